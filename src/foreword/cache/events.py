"""Events for changes of the cached content, for a router or another process that mirrors it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be hit from now on. hash names the whole prefix up to its end, parent_hash the prefix before it.

    extra_keys: what else has to be equal in it, such as ("salt", "x"); see `foreword.cache.keys`. adapter: number and
    name of the adapter that the whole prefix was computed with. is_passing: whether it is a state that its request
    replaces by a later one, if it gets that far.
    """

    hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]
    block: int
    group: int
    extra_keys: tuple[Hashable, ...] = ()
    adapter: tuple[int, str] | None = None
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block's content can no longer be hit: it was evicted, or now belongs to a longer prefix. is_replaced: whether
    it is a state that a later one replaces.
    """

    hash: bytes
    block: int
    group: int
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block can be hit any more."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared
