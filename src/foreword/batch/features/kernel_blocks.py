"""Block tables for attention kernels whose block is smaller than the allocator's."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors


def kernel_block_table(batch: BatchTensors, group: int = 0) -> I32:
    """int32 [Bp, K · r]: allocation block n is the kernel blocks n·r … n·r + r − 1, r = block_size / kernel_block_size;
    a null block is r null blocks. The gathered table itself where r = 1.
    """
    table, states_table = batch.block_table[group], batch.states.block_tables[group]
    kv_group, null = states_table.group, states_table.null_block
    ratio = kv_group.block_size // (kv_group.kernel_block_size or kv_group.block_size)
    if ratio == 1:
        return table
    out: I32 = batch.optional("kernel_block_table", group)[: len(table)]
    parts = out.reshape(*table.shape, ratio)
    np.multiply(table[:, :, None], ratio, out=parts)
    parts += np.arange(ratio, dtype=np.int32)
    parts[table == null] = null
    return out
