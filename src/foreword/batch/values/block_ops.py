"""Operations on cache blocks before a step reads them: zeroed where that matters, copied before a write if shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class BlockOps:
    """The operations on the cache that the executor runs before a step. Order: zero, then copy, then the step's reads
    and writes.

    zero: int32 [Z], blocks that must read as zeros until they are written (recurrent states, sparse layouts).
    copies: int32 [C, 2], (from, to): ``to`` is a private copy of a shared block that its request is about to write.
    All sources are read before any destination is written.
    NONE: the value without operations, which all steps without operations share.
    """

    NONE: ClassVar[BlockOps]

    zero: I32
    copies: I32

    @classmethod
    def of(cls, zero: Iterable[int] = (), copies: Iterable[tuple[int, int]] = (), *, null_block: int = 0) -> BlockOps:
        """Return the operations from plain numbers. Raise PlanError if two copies write the same block, or a copy
        writes the null block.
        """
        z = np.array(list(zero), np.int32)
        c = np.array([tuple(pair) for pair in copies], np.int32).reshape(-1, 2)
        targets = c[:, 1]
        if len(set(targets.tolist())) != len(targets):
            raise PlanError("two copies write one block", tensor="block_ops.copies", got=targets.tolist())
        if (targets == null_block).any():
            raise PlanError("a copy writes the null block", tensor="block_ops.copies", got=c.tolist())
        return cls(z, c) if len(z) or len(c) else BlockOps.NONE

    def __bool__(self) -> bool:
        return bool(len(self.zero) or len(self.copies))

    def apply(self, *caches: AnyArray) -> None:
        """Apply the operations to caches [num_blocks, …]."""
        for cache in caches:
            cache[self.zero] = 0
            cache[self.copies[:, 1]] = cache[self.copies[:, 0]]


BlockOps.NONE = BlockOps(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
