"""The system-level block table of one KV group: logical block of a request → physical block in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.batch.groups import ContextParallel, KVGroup


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Rows of one KV group.

    table: int32 [R, K], entry k of a row holds positions k·P … k·P + P − 1 with P = ``tokens_per_block``;
    0 from num_blocks[row] on. num_blocks: int32 [R]. K = ceil(M / P). The addresses never change.
    """

    group: KVGroup
    context_parallel: ContextParallel | None
    tokens_per_block: int
    table: npt.NDArray[np.int32]
    num_blocks: npt.NDArray[np.int32]

    @classmethod
    def allocate(cls, group: KVGroup, cp: ContextParallel | None, max_num_reqs: int, max_model_len: int) -> BlockTable:
        group.check_context_parallel(cp)
        per_block = group.tokens_per_block(cp)
        width = -(-max_model_len // per_block)
        return cls(
            group,
            cp if group.context_parallel else None,
            per_block,
            np.zeros((max_num_reqs, width), np.int32),
            np.zeros(max_num_reqs, np.int32),
        )

    @property
    def width(self) -> int:
        """K, the number of entries of a row."""
        return int(self.table.shape[1])

    def append(self, row: int, block_ids: npt.NDArray[np.int32]) -> None:
        """table[row, num_blocks[row] :][: len(block_ids)] = block_ids. The caller has checked that they fit."""
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def clear(self, row: int) -> None:
        """Null every entry of the row, so that nothing of its last owner can be reached."""
        self.table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
