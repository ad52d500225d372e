"""Paged KV bookkeeping: the owners of every block, and the prefixes that can be reused."""

from foreword.cache.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from foreword.cache.groups import (
    CacheGroup,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    cache_group,
    longest_common_hit,
)
from foreword.cache.hits import PrefixHit
from foreword.cache.keys import adapter_of, prefix_keys, salt_of, with_adapter
from foreword.cache.manager import Allocation, KVCacheManager
from foreword.cache.miss import MEANING, CacheMiss
from foreword.cache.pool import BlockPool, PoolObserver
from foreword.cache.prefix import PrefixNode, PrefixTree, hash_block
from foreword.cache.snapshots import StateSnapshots
from foreword.cache.tiers import BlockFormat, BlockTier, HostTier, TierFactory, block_name

__all__ = [
    "MEANING",
    "Allocation",
    "BlockFormat",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTier",
    "CacheCleared",
    "CacheEvent",
    "CacheGroup",
    "CacheMiss",
    "FullAttention",
    "HostTier",
    "KVCacheManager",
    "PoolObserver",
    "PrefixHit",
    "PrefixNode",
    "PrefixTree",
    "RecurrentState",
    "SlidingWindow",
    "StateSnapshots",
    "TierFactory",
    "adapter_of",
    "block_name",
    "cache_group",
    "hash_block",
    "longest_common_hit",
    "prefix_keys",
    "salt_of",
    "with_adapter",
]  # fmt: skip
