"""FlashAttention's variable-length interface with a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors, local_seq_lens, prefix_sum


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttnVarlen:
    """Arguments of a varlen call: request b's queries are rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1, its
    cu_seqlens_k[b + 1] − cu_seqlens_k[b] keys are in the pages of block_table[b], −1 past its last block.

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; block_table: int32 [B, blocks of the longest row of the batch].
    A group spread over ranks: this rank's keys, packed in the pages in order of position.
    """

    cu_seqlens_q: I32
    cu_seqlens_k: I32
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: I32


def flash_attn_varlen(batch: BatchTensors, group: int = 0) -> FlashAttnVarlen:
    """The step as FlashAttention takes it, at stable addresses; valid as long as the batch is."""
    B, lens, held = batch.num_reqs, local_seq_lens(batch, group), batch.num_blocks[group]
    cu_seqlens_k: I32 = prefix_sum(batch, "cu_seqlens_k", lens, group)
    width = int(held.max(initial=0))
    table: I32 = batch.optional("varlen_block_table", group)[:B, :width]
    table[:] = batch.block_table[group][:B, :width]
    table[np.arange(width) >= held[:, None]] = -1
    return FlashAttnVarlen(
        batch.query_start_loc[: B + 1], cu_seqlens_k, batch.max_query_len, int(lens.max(initial=0)), table
    )
