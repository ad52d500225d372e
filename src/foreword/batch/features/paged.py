"""Arguments of attention kernels over a paged cache: FlashAttention, FlashInfer, kernels with smaller blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors, filled, local_seq_lens, prefix_sum, refuse_wide


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
    """Return the step as FlashAttention takes it, at stable addresses; valid as long as the batch is."""
    B, lens, held = batch.num_reqs, local_seq_lens(batch, group), batch.num_blocks[group]
    cu_seqlens_k: I32 = prefix_sum(batch, "cu_seqlens_k", lens, group)
    width = int(held.max(initial=0))
    table: I32 = batch.optional("varlen_block_table", group)[:B, :width]
    table[:] = batch.block_table[group][:B, :width]
    table[np.arange(width) >= held[:, None]] = -1
    return FlashAttnVarlen(
        batch.query_start_loc[: B + 1], cu_seqlens_k, batch.max_query_len, int(lens.max(initial=0)), table
    )


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferPlan:
    """Arguments of a plan call. Request b's queries are rows qo_indptr[b] … qo_indptr[b + 1] − 1, its pages are
    kv_indices[kv_indptr[b] : kv_indptr[b + 1]], of which the last holds kv_last_page_len[b] (1 … S) tokens.

    qo_indptr, kv_indptr: int32 [B + 1]; kv_indices: int32 [pages in all]; kv_last_page_len: int32 [B].
    A group spread over ranks: this rank's pages and keys; a request of which it has none has no page, and length 0.
    """

    qo_indptr: I32
    kv_indptr: I32
    kv_indices: I32
    kv_last_page_len: I32


def flashinfer_plan(batch: BatchTensors, group: int = 0) -> FlashInferPlan:
    """Return the step as FlashInfer takes it, at stable addresses; valid as long as the batch is."""
    B, S = batch.num_reqs, batch.states.block_tables[group].group.block_size
    seq_lens = local_seq_lens(batch, group)
    pages = -(-seq_lens // S)
    kv_indptr: I32 = prefix_sum(batch, "kv_indptr", pages, group)
    blocks = batch.block_table[group][np.repeat(np.arange(B), pages), ragged_arange(pages)]
    kv_indices: I32 = filled(batch, "kv_indices", blocks, group)
    np.maximum(kv_indices, 0, out=kv_indices)  # null_block −1 below the window: any page that exists
    kv_last_page_len: I32 = filled(batch, "kv_last_page_len", seq_lens - np.maximum(pages - 1, 0) * S, group)
    return FlashInferPlan(batch.query_start_loc[: B + 1], kv_indptr, kv_indices, kv_last_page_len)


def kernel_block_table(batch: BatchTensors, group: int = 0) -> I32:
    """Return the table of kernel blocks, int32 [Bp, K · r]: allocation block n is the kernel blocks n·r … n·r + r − 1,
    r = block_size / kernel_block_size; a null block is r null blocks. Where r = 1 it is the gathered table itself.
    Raise PlanError for a kernel block past int32.
    """
    table, states_table = batch.block_table[group], batch.states.block_tables[group]
    kv_group, null = states_table.group, states_table.null_block
    ratio = kv_group.block_size // (kv_group.kernel_block_size or kv_group.block_size)
    if ratio == 1:
        return table
    out: I32 = batch.optional("kernel_block_table", group)[: len(table)]
    refuse_wide(batch, "kernel_block_table", (int(table.max(initial=0)) + 1) * ratio - 1)
    parts = out.reshape(*table.shape, ratio)
    np.multiply(table[:, :, None], ratio, out=parts)
    parts += np.arange(ratio, dtype=np.int32)
    parts[table == null] = null
    return out
