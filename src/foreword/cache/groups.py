"""The rules of each kind of layer: which blocks a hit must find, and which blocks are no longer read.

A model is a list of groups over one pool of blocks. A group is a few lines of arithmetic in blocks of its own size:

    full attention      a hit of n blocks needs blocks 0 … n−1            nothing expires
    sliding window w    a hit needs the last ceil((w−1)/S) before it      blocks wholly below the window expire
    recurrent state     a hit needs the state kept after block n−1        nothing expires

Block k of a recurrent state is a snapshot of the state after k + 1 blocks, kept at few places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreword.arrays import I64, Bools, Ints
from foreword.batch import ContextParallel, KVGroup


@dataclass(frozen=True, slots=True)
class CacheGroup(ABC):
    """The rules of one group. Lengths are in blocks of the group, ``present[k]``: block k of the prefix is cached.

    allows_partial_hit: whether the content at the start of a block can be reused without the rest of it.
    """

    allows_partial_hit: ClassVar[bool] = True
    block_size: int

    @abstractmethod
    def longest_hit(self, present: Bools, limit: int) -> int:
        """Return the largest n ≤ limit such that a request can continue after n blocks."""

    def first_needed(self, num_computed: Ints) -> I64:
        """Return, for each request, the first block that the token at position ``num_computed`` or a later one can
        read.
        """
        return np.zeros(len(num_computed), np.int64)

    def most_blocks(self, num_tokens: int, num_new: int) -> int:
        """Return the largest number of blocks held while a request grows to ``num_tokens``, by at most ``num_new`` per
        step.
        """
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class FullAttention(CacheGroup):
    """Every token reads all before it."""

    def longest_hit(self, present: Bools, limit: int) -> int:
        cached = np.asarray(present[:limit], np.bool_)
        return limit if cached.all() else int(np.argmin(cached))


@dataclass(frozen=True, slots=True)
class SlidingWindow(CacheGroup):
    """A token at position p reads positions (p − window, p]."""

    window: int

    def longest_hit(self, present: Bools, limit: int) -> int:
        wanted = -(-(self.window - 1) // self.block_size)
        cached = np.asarray(present[:limit], np.bool_)
        ends = np.arange(1, limit + 1)
        runs = ends - np.maximum.accumulate(np.where(cached, 0, ends))  # cached blocks right before each end
        good = np.flatnonzero(runs >= np.minimum(wanted, ends))
        return int(good[-1]) + 1 if good.size else 0

    def first_needed(self, num_computed: Ints) -> I64:
        lowest = np.asarray(num_computed, np.int64) - (self.window - 1)
        return np.maximum(lowest, 0) // self.block_size

    def most_blocks(self, num_tokens: int, num_new: int) -> int:
        # The window of the first new token may begin inside a block, and the last new token end inside one.
        span = -(-(self.window - 1 + num_new) // self.block_size) + 1
        return min(span, -(-num_tokens // self.block_size))


@dataclass(frozen=True, slots=True)
class RecurrentState(CacheGroup):
    """One state per request, overwritten by every step: one block for all its tokens.

    block_size: snapshots can be kept after any multiple of this many tokens, each in its own block.
    """

    allows_partial_hit: ClassVar[bool] = False

    def longest_hit(self, present: Bools, limit: int) -> int:
        kept = np.flatnonzero(present[:limit])
        return int(kept[-1]) + 1 if kept.size else 0

    def most_blocks(self, num_tokens: int, num_new: int) -> int:
        return 1


def cache_group(group: KVGroup, cp: ContextParallel | None = None) -> CacheGroup:
    """Return the rules of a group of the batch layer. A block of a group on several ranks has the tokens of all."""
    if group.recurrent:
        return RecurrentState(group.block_size)
    block_size = group.block_size * (cp.size if cp is not None and group.context_parallel else 1)
    if group.sliding_window is None:
        return FullAttention(block_size)
    return SlidingWindow(block_size, group.sliding_window)


def longest_common_hit(groups: Sequence[CacheGroup], present: Sequence[Bools], limit: int, unit: int) -> int:
    """Return the longest hit, in tokens, that every group accepts: the fixed point over the groups.

    present[g][k]: block k of group g is cached. limit: tokens. Every group may shorten the candidate; one that does
    makes the others look again. Hits are multiples of ``unit``, the least common multiple of the block sizes.
    """
    hit = limit // unit * unit
    while True:
        before = hit
        for group, cached in zip(groups, present, strict=True):
            size = group.block_size
            hit = group.longest_hit(cached, hit // size) * size // unit * unit
        if hit == before:
            return hit
