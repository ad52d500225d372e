"""Compute the slots of keys and values in NumPy: shared by the vectorised backend and by adapters."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I64, Ints
from foreword.batch.state.block_table import BlockTable


def ragged_arange(lengths: Ints) -> I64:
    """Return [0 … lengths[0] − 1, 0 … lengths[1] − 1, …] as int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - lengths, lengths)


def slots(table: BlockTable, rows: Ints, positions: Ints) -> I64:
    """Return slot[t] = table[rows[t], positions[t] // P] · S + offset; −1 where another rank owns the position."""
    if table.group.recurrent:
        return np.full(len(positions), -1, np.int64)
    S, cp = table.group.block_size, table.context_parallel
    block, offset = np.divmod(positions, table.tokens_per_block)
    base = table.table[rows, block].astype(np.int64) * S
    if cp is None:
        return base + offset
    run = cp.interleave * cp.size
    local = offset // run * cp.interleave + offset % cp.interleave
    owned = (offset // cp.interleave) % cp.size == cp.rank
    return np.where(owned, base + local, -1)
