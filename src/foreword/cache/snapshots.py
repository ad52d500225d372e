"""Snapshots of recurrent states, kept at few places so that a later request with the same prefix starts from there.

    row        ──── step ends at a stop ──┬── next step ──────── …      its state stays in one block, overwritten
                                          └─copy─▶ snapshot             a block of the prefix tree, like any content

The copy is made before the step that computes the next token, so it exists once more tokens are computed than it
covers; until then the row holds its blocks. A hit copies the snapshot back: a snapshot is never written again.

With drafts in flight, it is not known how many tokens the next step continues from, so nothing is kept.

Of the snapshots at intervals, a request keeps the newest one: when it makes another, the one before is forgotten,
unless another request has begun with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreword.arrays import I32
from foreword.batch import BlockTable, RequestStates
from foreword.cache.content import CachedContent
from foreword.cache.pool import BlockPool
from foreword.cache.prefix import PrefixNode

# Apart from stops, a state is kept where a step ends at a multiple of this many hit units.
INTERVAL = 16

NO_BLOCKS: I32 = np.zeros(0, np.int32)
NO_COPIES: I32 = np.zeros((0, 2), np.int32)


class StateSnapshots:
    """The snapshots of all recurrent groups.

    tables: of ``states``, the block table of each recurrent group, by group index. unit: tokens between two snapshots.
    """

    def __init__(
        self, content: CachedContent, pool: BlockPool, tables: dict[int, BlockTable], unit: int, states: RequestStates
    ) -> None:
        self._content, self._pool, self._tables, self._unit, self._states = content, pool, tables, unit, states
        self._stops = np.zeros((states.max_num_reqs, 2), np.int32)
        self._newest = np.zeros(states.max_num_reqs, np.int32)  # by row: tokens of its last snapshot, 0 for none
        # By row: tokens of its last snapshot at an interval that no other request uses, 0 for none.
        self._replaced = np.zeros(states.max_num_reqs, np.int32)
        # Row → (tokens, one block per group) of copies whose step is not committed, oldest first.
        self._pending: dict[int, list[tuple[int, I32]]] = {}

    @property
    def pending(self) -> Sequence[int]:
        """Return the rows with copies whose step is not committed."""
        return tuple(self._pending)

    def stops(self, num_tokens: int, num_known: int) -> tuple[int, int]:
        """Return where chunks of a prompt should end: where it leaves known content, and at its last whole unit."""
        last = (num_tokens - 1) // self._unit * self._unit
        return min(num_known // self._unit * self._unit, last), last

    def attach(self, row: int, stops: tuple[int, ...], num_hit: int) -> None:
        """Follow a request that was admitted to the row with a state after ``num_hit`` tokens."""
        self._stops[row] = stops
        self._newest[row] = num_hit
        self._keep_for_others(num_hit)

    def cut(self, rows: I32, computed: I32, n: I32) -> I32:
        """Return how many of n[i] tokens after computed[i] are before the next stop of the row; beyond its stops,
        before the next interval, which drafts must not step over.
        """
        ahead = self._stops[rows] - computed[:, None]
        interval = INTERVAL * self._unit
        beyond = interval - computed % interval
        room: I32 = np.where(ahead > 0, ahead, np.where(ahead.max(1) > 0, n, beyond)[:, None]).min(1)
        return np.minimum(n, room)

    def keep(self, rows: I32, computed: I32) -> I32:
        """Return the copies, int32 [C, 2] (from, to), to make before a step that continues from computed[i] tokens.

        Copies take free blocks only; rows for which no block is free keep nothing.
        """
        here = (self._stops[rows] == computed[:, None]).any(1) | (computed % (INTERVAL * self._unit) == 0)
        in_flight = self._states.num_placeholders[rows]  # one, and the drafts
        at = np.flatnonzero(here & (computed > 0) & (in_flight <= 1))[: self._pool.num_free // len(self._tables)]
        if not at.size:
            return NO_COPIES
        blocks = self._pool.allocate(at.size * len(self._tables)).reshape(at.size, -1)
        for i, own in zip(at.tolist(), blocks, strict=True):
            self._pending.setdefault(int(rows[i]), []).append((int(computed[i]), own))
        entries = np.where(in_flight[at], 0, self._states.num_accepted_tokens[rows[at]] - 1)
        sources = np.stack([table.table[rows[at], entries] for table in self._tables.values()], 1)
        return np.stack([sources.ravel(), blocks.ravel()], 1)

    def publish(self, row: int, computed: int) -> None:
        """Make the row's completed copies hittable. The row's path in the tree covers ``computed`` tokens."""
        pending = self._pending.get(row, [])
        while pending and pending[0][0] < computed:
            num_tokens, blocks = pending.pop(0)
            node, index, kept = self._kept(row, num_tokens)
            is_passing = num_tokens not in self._stops[row]
            for i, g in enumerate(self._tables):
                if not kept[i]:  # else an equal state is kept already
                    own = blocks[i : i + 1].astype(np.intp)
                    self._content.hold(node, g, own, np.array([index]), is_passing=is_passing)
            self._pool.free(blocks)
            self._newest[row] = num_tokens
            if kept.any():
                self._keep_for_others(num_tokens)
            elif is_passing:
                self._forget_replaced(row)
                self._replaced[row] = num_tokens
        if not pending:
            self._pending.pop(row, None)

    def drop_pending(self) -> None:
        """Forget all copies whose step is not committed, and free their blocks."""
        for pending in self._pending.values():
            self._pool.free(np.concatenate([own for _, own in pending]))
        self._pending.clear()

    def _kept(self, row: int, num_tokens: int) -> tuple[PrefixNode, int, I32]:
        """Return where the snapshot after so many tokens of the row is in the tree, and its block in each group, 0 for
        none.
        """
        index = num_tokens // self._content.tree.block_size - 1
        node = self._content.tree.node_of(row, index)
        return node, index, np.array([node.blocks[g][index - node.start] for g in self._tables], np.int32)

    def _keep_for_others(self, num_tokens: int) -> None:
        """Do not forget snapshots after so many tokens, of which one has a further use."""
        self._replaced[self._replaced == num_tokens] = 0

    def _forget_replaced(self, row: int) -> None:
        if self._replaced[row]:
            *_, kept = self._kept(row, int(self._replaced[row]))
            unused = kept[(kept != 0) & (self._pool.num_refs[kept] == 0)]
            if unused.size:
                self._content.remove(unused, is_replaced=True)
                self._pool.forget(unused)

    def detach_all(self) -> None:
        """Forget every row. The caller frees all blocks."""
        self._pending.clear()
        self._newest[:] = 0
        self._replaced[:] = 0
        self._stops[:] = 0

    def detach(self, row: int) -> I32:
        """Forget the row, which is still in the tree. The caller frees the returned blocks after the row's own.

        The newest snapshot is among them, so that it is the last of the row's blocks to be evicted.
        """
        blocks = [own for _, own in self._pending.pop(row, [])]
        if self._newest[row]:
            *_, newest = self._kept(row, int(self._newest[row]))
            self._pool.touch(newest[newest != 0])
            blocks.append(newest)
        self._newest[row] = self._replaced[row] = 0
        self._stops[row] = 0
        return np.concatenate(blocks) if blocks else NO_BLOCKS
