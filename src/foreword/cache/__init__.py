"""Paged KV bookkeeping: who owns which block of the cache, and which prefixes can be reused."""

from foreword.cache.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from foreword.cache.groups import (
    CacheGroup,
    FullAttention,
    RunningState,
    SlidingWindow,
    cache_group,
    longest_common_hit,
)
from foreword.cache.hits import PrefixHit
from foreword.cache.keys import prefix_keys
from foreword.cache.manager import KVCache
from foreword.cache.pool import BlockPool
from foreword.cache.prefix import PrefixNode, PrefixTree, hash_block

__all__ = [
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheEvent",
    "CacheGroup",
    "FullAttention",
    "KVCache",
    "PrefixHit",
    "PrefixNode",
    "PrefixTree",
    "RunningState",
    "SlidingWindow",
    "cache_group",
    "hash_block",
    "longest_common_hit",
    "prefix_keys",
]
