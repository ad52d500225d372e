"""FlashInfer's paged wrappers: the page table as compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32
from foreword.batch.prepare.backends.vectorized import ragged_arange

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch


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


def flashinfer_plan(batch: InputBatch, group: int = 0) -> FlashInferPlan:
    """The step as FlashInfer takes it. Copies: it stays true after the next step."""
    B, S = batch.num_reqs, batch.states.block_tables[group].group.block_size
    seq_lens = batch.local_seq_lens(group)
    pages = -(-seq_lens // S)
    kv_indptr = np.zeros(B + 1, np.int32)
    np.cumsum(pages, out=kv_indptr[1:])
    rows = np.repeat(np.arange(B), pages)
    kv_indices = batch.block_table[group][rows, ragged_arange(pages)]
    return FlashInferPlan(
        batch.query_start_loc[: B + 1].copy(), kv_indptr, kv_indices, seq_lens - np.maximum(pages - 1, 0) * S
    )
