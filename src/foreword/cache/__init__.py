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

__all__ = [
    "MEANING",
    "Allocation",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheEvent",
    "CacheGroup",
    "CacheMiss",
    "FullAttention",
    "KVCacheManager",
    "PoolObserver",
    "PrefixHit",
    "PrefixNode",
    "PrefixTree",
    "RecurrentState",
    "SlidingWindow",
    "StateSnapshots",
    "adapter_of",
    "cache_group",
    "hash_block",
    "longest_common_hit",
    "prefix_keys",
    "salt_of",
    "with_adapter",
]  # fmt: skip
