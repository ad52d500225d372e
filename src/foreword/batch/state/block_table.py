"""Block tables: logical block of a request → physical block in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from operator import setitem

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch.state.changes import Change, make
from foreword.batch.state.memory import zeros
from foreword.batch.values.kv_groups import ContextParallel, KVGroup


class ContentIds:
    """Numbers from 1 on that are never used twice. next: int64 [1], which native code reads and increments, too."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next: I64 = np.ones(1, np.int64)

    def take(self, count: int = 1) -> int:
        """Return the first of ``count`` successive new numbers."""
        first = int(self.next[0])
        self.next += count
        return first


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Rows of one KV group.

    table: int32 [R, K], entry k of a row holds positions k·P … k·P + P − 1 with P = ``tokens_per_block``;
    ``null_block`` from num_blocks[row] on. num_blocks: int32 [R]. K is ceil(M / P). The addresses never change.
    In a recurrent group, entry 0 of a row is the block of its state, and K = 1 + max_num_draft_tokens: after a step
    with drafts, entry i has the state after the first i of them (`foreword.batch.features.recurrent`).
    content_id: int64 [R], unique per content of any row. Appending keeps it; any other change renews it. A gathered
    copy of a row with the same number can only lack blocks at the end. Change a row only through the methods;
    `changes.make` applies the changes that they return.
    holds_null: bool [1], whether any row was ever given a null block. ``may_hold_null`` reads it.
    """

    group: KVGroup
    context_parallel: ContextParallel | None
    tokens_per_block: int
    null_block: int
    table: I32
    num_blocks: I32
    content_id: I64
    holds_null: Bools
    ids: ContentIds

    @classmethod
    def allocate(
        cls,
        group: KVGroup,
        cp: ContextParallel | None,
        max_num_reqs: int,
        max_model_len: int,
        null_block: int,
        ids: ContentIds,
        max_num_draft_tokens: int = 0,
    ) -> BlockTable:
        group.check_context_parallel(cp)
        per_block = group.tokens_per_block(cp, max_model_len)
        width = 1 + max_num_draft_tokens if group.recurrent else -(-max_model_len // per_block)
        shape = max_num_reqs, width
        sizes = f"max_num_reqs={max_num_reqs}, max_model_len={max_model_len}, block_size={group.block_size}"
        blocks: I32 = zeros(shape, "int32", sizes)
        if null_block:
            blocks[:] = null_block
        return cls(
            group,
            cp if group.context_parallel else None,
            per_block,
            null_block,
            blocks,
            np.zeros(max_num_reqs, np.int32),
            np.zeros(max_num_reqs, np.int64),
            np.zeros(1, np.bool_),
            ids,
        )

    @property
    def width(self) -> int:
        """The number of entries of a row, K."""
        return int(self.table.shape[1])

    @property
    def may_hold_null(self) -> bool:
        """Return whether a step must check that it writes to no null block: a row was given one, or a window frees
        blocks.
        """
        return bool(self.holds_null[0]) or self.group.sliding_window is not None

    def note_nulls(self, lowest: np.integer) -> None:
        """Record that a row holds a null block, if the lowest of some block ids is one."""
        if lowest == self.null_block:
            self.holds_null[0] = True

    def append(self, row: int, block_ids: I32) -> list[Change]:
        """Return the changes that append blocks to a row. The caller has checked that they fit."""
        return self._write(row, int(self.num_blocks[row]), block_ids)

    def start(self, row: int, block_ids: I32) -> list[Change]:
        """Return the changes after which a row holds exactly these blocks."""
        rest = row, slice(len(block_ids), int(self.num_blocks[row]))
        return [
            (setitem, self.table, rest, self.null_block),
            *self._write(row, 0, block_ids),
            (setitem, self.content_id, row, self.ids.take()),
        ]

    def _write(self, row: int, start: int, block_ids: I32) -> list[Change]:
        end = start + len(block_ids)
        return [(setitem, self.table, (row, slice(start, end)), block_ids), (setitem, self.num_blocks, row, end)]

    def replace(self, row: int, index: int, block_id: int) -> None:
        """Replace the block of one entry: a copy on write, or null for one below the sliding window."""
        self.note_nulls(np.int32(block_id))
        make([(setitem, self.table, (row, index), block_id), (setitem, self.content_id, row, self.ids.take())])

    def clear_all(self) -> None:
        """Set every entry of every row to the null block, also past the blocks that a row holds."""
        self.table[:] = self.null_block
        self.num_blocks[:] = 0
        self.content_id[:] = self.ids.take(len(self.content_id)) + np.arange(len(self.content_id))
