"""FlashInfer's paged wrappers: the page table as compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors, filled, local_seq_lens, prefix_sum


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
    """The step as FlashInfer takes it, at stable addresses; valid as long as the batch is."""
    B, S = batch.num_reqs, batch.states.block_tables[group].group.block_size
    seq_lens = local_seq_lens(batch, group)
    pages = -(-seq_lens // S)
    kv_indptr: I32 = prefix_sum(batch, "kv_indptr", pages, group)
    blocks = batch.block_table[group][np.repeat(np.arange(B), pages), ragged_arange(pages)]
    kv_indices: I32 = filled(batch, "kv_indices", blocks, group)
    np.maximum(kv_indices, 0, out=kv_indices)  # null_block −1 below the window: any page that exists
    kv_last_page_len: I32 = filled(batch, "kv_last_page_len", seq_lens - np.maximum(pages - 1, 0) * S, group)
    return FlashInferPlan(batch.query_start_loc[: B + 1], kv_indptr, kv_indices, kv_last_page_len)
