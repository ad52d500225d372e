"""The system-level block table of one KV group: logical block of a request → physical block in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.values.kv_groups import ContextParallel, KVGroup


class ContentIds:
    """Hands out numbers that were never handed out before, from 1."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = 1

    def take(self, count: int = 1) -> int:
        """The first of ``count`` new numbers in a row."""
        first = self.next
        self.next += count
        return first


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Rows of one KV group.

    table: int32 [R, K], entry k of a row holds positions k·P … k·P + P − 1 with P = ``tokens_per_block``;
    0 from num_blocks[row] on. num_blocks: int32 [R]. K = ceil(M / P). The addresses never change.
    content_id: int64 [R], a number no other content of any row ever had; appending keeps it, any other change renews
    it, so that a gathered copy of a row knows whether only its tail is new. Change a row through the methods.
    """

    group: KVGroup
    context_parallel: ContextParallel | None
    tokens_per_block: int
    table: I32
    num_blocks: I32
    content_id: I64
    ids: ContentIds

    @classmethod
    def allocate(
        cls, group: KVGroup, cp: ContextParallel | None, max_num_reqs: int, max_model_len: int, ids: ContentIds
    ) -> BlockTable:
        group.check_context_parallel(cp)
        per_block = group.tokens_per_block(cp, max_model_len)
        width = -(-max_model_len // per_block)
        return cls(
            group,
            cp if group.context_parallel else None,
            per_block,
            np.zeros((max_num_reqs, width), np.int32),
            np.zeros(max_num_reqs, np.int32),
            np.zeros(max_num_reqs, np.int64),
            ids,
        )

    @property
    def width(self) -> int:
        """K, the number of entries of a row."""
        return int(self.table.shape[1])

    def append(self, row: int, block_ids: I32) -> None:
        """table[row, num_blocks[row] :][: len(block_ids)] = block_ids. The caller has checked that they fit."""
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def start(self, row: int, block_ids: I32) -> None:
        """Make the row hold these blocks and nothing else."""
        self.table[row, len(block_ids) : self.num_blocks[row]] = 0
        self.table[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        self.content_id[row] = self.ids.take()

    def replace(self, row: int, index: int, block_id: int) -> None:
        """Put another block in the place of one entry: a copy on write, or null for one below the sliding window."""
        self.table[row, index] = block_id
        self.content_id[row] = self.ids.take()

    def clear(self, row: int) -> None:
        """Null every entry of the row, so that nothing of its last owner can be reached."""
        self.start(row, self.table[row, :0])
