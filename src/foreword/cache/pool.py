"""The block pool: free blocks and their order, and the number of owners of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from foreword.arrays import I32, I64, Ints
from foreword.errors import CapacityError, ConfigError


class PoolObserver(Protocol):
    """A function that is called with blocks that became free, and the KV group whose block table held them."""

    def blocks_freed(self, block_ids: list[int], group: int) -> None: ...


class BlockNumbers:
    """The blocks of one or several pools by number, from 0, the null block, which no pool allocates or frees.

    num_refs: int32 [count], owners of each block. is_cached: bool [count], content that a lookup can find.
    """

    def __init__(self, count: int) -> None:
        self.num_refs = np.zeros(count, np.int32)
        self.is_cached = np.zeros(count, np.bool_)
        # Entry i of the queue of a block's pool is valid while place[queue[i]] == i.
        self.place = np.full(count, -1, np.int64)


class BlockPool:
    """``num_blocks`` blocks with reference counts, the null block among them if their numbers begin with 0.

    The free blocks have one order, and `allocate` takes from its front:

        front ─▶ [ stack: no cached content, last freed first ][ queue: cached content, longest free first ] ◀─ back

    so that content which can still be hit is evicted last, least recently used first. A block leaves the middle of the
    queue in O(1) when a hit takes it (`touch`): its entry goes stale and is skipped later. All operations take arrays.

    numbers: of the blocks of all pools; None: of this one alone. first: the number of its first block.
    num_refs, is_cached: see `BlockNumbers`. observers: called by `free`.
    on_evict: called with the cached blocks that an allocation is about to overwrite.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Ints], None] | None = None,
        *,
        numbers: BlockNumbers | None = None,
        first: int = 0,
    ) -> None:
        if first + num_blocks < 2:
            raise ConfigError(f"num_blocks={num_blocks}: must be at least 2, since block 0 is the null block")
        numbers = numbers or BlockNumbers(num_blocks)
        self.num_blocks = num_blocks
        self.num_refs, self.is_cached, self._place = numbers.num_refs, numbers.is_cached, numbers.place
        self.observers: list[PoolObserver] = []
        self._on_evict = on_evict
        self._own = range(max(first, 1), first + num_blocks)
        self._stack = np.array(self._own[::-1], np.int32)  # the top is the end: the first is taken first
        self._stack_len = len(self._own)
        self._queue = np.zeros(2 * num_blocks, np.int32)
        self._head = self._tail = 0
        self._num_queued = 0

    @property
    def num_free(self) -> int:
        """The number of blocks that `allocate` can return, cached ones included."""
        return self._stack_len + self._num_queued

    @property
    def num_used(self) -> int:
        """The number of blocks with an owner."""
        return len(self._own) - self.num_free

    @property
    def usage(self) -> float:
        """The part of its blocks that have an owner, without the null block."""
        return self.num_used / len(self._own)

    def allocate(self, count: int) -> I32:
        """Take ``count`` blocks from the front, each with one reference. Return them, int32 [count].

        Raise CapacityError if fewer are free, and nothing changes.
        """
        self.check_free(count)
        top = self._stack_len
        left = max(top - count, 0)
        blocks = self._stack[left:top][::-1].copy()
        self._stack_len = left
        if len(blocks) < count:
            queued = self._take_from_queue(count - len(blocks))
            self._evict(queued)
            blocks = np.concatenate((blocks, queued)) if top else queued
        self.num_refs[blocks.astype(np.intp)] = 1
        return blocks

    def check_free(self, count: int) -> None:
        """Raise CapacityError if fewer blocks are free."""
        if count > self.num_free:
            raise CapacityError(f"{count} blocks wanted, {self.num_free} of {len(self._own)} are free")

    def touch(self, blocks: I32) -> None:
        """Add an owner to each of these blocks, free or not. They must be distinct, and cached if they are free."""
        blocks = blocks.astype(np.intp)
        free = blocks[self.num_refs[blocks] == 0]
        if free.size:
            self._place[free] = -1
            self._num_queued -= free.size
        self.num_refs[blocks] += 1

    def free(self, blocks: I32, *, group: int | None = None, distinct: bool = False) -> None:
        """Remove one owner for each entry. Blocks without owners become free in the given order.

        Pass a request's blocks tail first: of two blocks freed together, the first one given is evicted first. A block
        may occur more than once (two owners leave together), unless ``distinct``. Null blocks are skipped.
        group: the KV group whose table held them, reported to the observers; None: no table held them.
        """
        if np.count_nonzero(blocks) < len(blocks):
            blocks = blocks[blocks != 0]
        if not blocks.size:
            return
        blocks = blocks.astype(np.intp)
        if distinct:
            refs = self.num_refs[blocks]
            refs -= 1
            self.num_refs[blocks] = refs
            freed = blocks[refs == 0]
        else:
            np.subtract.at(self.num_refs, blocks, 1)
            freed = blocks[self.num_refs[blocks] == 0]
            if freed.size > 1:
                freed = self._distinct(freed)
        if self.observers and group is not None:
            for observer in self.observers:
                observer.blocks_freed(freed.tolist(), group)
        cached = self.is_cached[freed]
        plain = freed[~cached]
        if plain.size:
            self._stack[self._stack_len : self._stack_len + plain.size] = plain
            self._stack_len += plain.size
            freed = freed[cached]
        if freed.size:
            self._append_to_queue(freed)

    def forget(self, blocks: I32) -> None:
        """Make free blocks the next ones to be taken. Their content, which they had, is not cached any more."""
        free = blocks[self.num_refs[blocks] == 0]
        self._place[free] = -1
        self._num_queued -= free.size
        self._stack[self._stack_len : self._stack_len + free.size] = free
        self._stack_len += free.size

    def free_all(self) -> None:
        """Make every block free, also after a change that was interrupted. Cached content stays, in its order."""
        own = np.arange(self._own.start, self._own.stop, dtype=np.int32)
        self.num_refs[own] = 0
        is_cached = self.is_cached[own]
        place = self._place[own[is_cached]]
        queued = own[is_cached][np.argsort(np.where(place < 0, self._queue.size, place), kind="stable")]
        plain = own[~is_cached][::-1]
        self._stack[: plain.size] = plain
        self._stack_len = plain.size
        self._place[own] = -1
        self._head = self._tail = self._num_queued = 0
        self._append_to_queue(queued)

    def _distinct(self, freed: I64) -> I64:
        # A scatter keeps one entry of each block. `place` of a block that is not queued is unused.
        order = np.arange(freed.size)
        self._place[freed] = order
        kept: I64 = freed[self._place[freed] == order]
        self._place[freed] = -1
        return kept

    def _take_from_queue(self, count: int) -> I32:
        parts, missing = [], count
        while missing:
            head = self._head
            window = self._queue[head : min(head + missing, self._tail)]
            valid = window[self._place[window.astype(np.intp)] == np.arange(head, head + window.size)]
            parts.append(valid)
            missing -= valid.size
            self._head = head + window.size
        taken = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._place[taken.astype(np.intp)] = -1
        self._num_queued -= count
        return taken

    def _append_to_queue(self, blocks: Ints) -> None:
        if self._tail + blocks.size > self._queue.size:
            self._compact()
        end = self._tail + blocks.size
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._num_queued += blocks.size

    def _compact(self) -> None:
        # At most every num_blocks frees, so the amortised cost of a free is constant.
        entries = self._queue[self._head : self._tail]
        valid = entries[self._place[entries] == np.arange(self._head, self._tail)]
        self._queue[: valid.size] = valid
        self._place[valid] = np.arange(valid.size)
        self._head, self._tail = 0, valid.size

    def _evict(self, blocks: I32) -> None:
        blocks = blocks.astype(np.intp)
        cached = blocks[self.is_cached[blocks]]
        if cached.size:
            if self._on_evict is not None:
                self._on_evict(cached)
            self.is_cached[cached] = False
