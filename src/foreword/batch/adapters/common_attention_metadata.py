"""vLLM's CommonAttentionMetadata with its field names, for metadata builders that are written for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch.features.bidirectional import ranges_of_requests
from foreword.batch.features.graph import graph_inputs
from foreword.batch.features.multimodal import encoder_seq_lens
from foreword.batch.features.paged import kernel_block_table
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.graph_promise import GraphPromise
from foreword.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CommonAttentionMetadata:
    """One KV group of one step. Padding, where the step has it, is included; `unpadded` leaves it out.

    query_start_loc int32 [Bp + 1], seq_lens int32 [Bp], num_computed_tokens_cpu int32 [Bp],
    block_table_tensor int32 [Bp, K] (kernel blocks where they are smaller), slot_mapping int64 [Tp], positions
    int64 [Tp], is_prefilling bool [Bp], req_idx int32 [B] state rows, encoder_seq_lens int32 [Bp] or None,
    dcp_local_seq_lens int32 [Bp] or None, logits_indices_padded int64 [L], or padded for a captured graph.
    mm_req_doc_ranges: {batch index: bidirectional ranges with a token in the step}, both ends included; None if there
    are none. Every value is known on the host: the ``_cpu`` names are the same arrays and the upper bound is exact.
    """

    query_start_loc: I32
    seq_lens: I32
    num_computed_tokens_cpu: I32
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: I32
    slot_mapping: I64
    positions: I64
    is_prefilling: Bools
    req_idx: I32
    logits_indices_padded: I64
    num_logits_indices: int
    encoder_seq_lens: I32 | None = None
    dcp_local_seq_lens: I32 | None = None
    causal: bool = True
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None

    @property
    def query_start_loc_cpu(self) -> I32:
        return self.query_start_loc

    @property
    def seq_lens_cpu(self) -> I32:
        return self.seq_lens

    @property
    def seq_lens_cpu_upper_bound(self) -> I32:
        return self.seq_lens

    @property
    def encoder_seq_lens_cpu(self) -> I32 | None:
        return self.encoder_seq_lens

    @property
    def dcp_local_seq_lens_cpu(self) -> I32 | None:
        return self.dcp_local_seq_lens

    def token_to_req_indices(self) -> I32:
        """Return the request of each token, int32 [T]."""
        lens = np.diff(self.query_start_loc)
        return np.repeat(np.arange(len(lens), dtype=np.int32), lens)

    def unpadded(self) -> CommonAttentionMetadata:
        """Return the metadata without padding rows and tokens."""
        B, T = self.num_reqs, self.num_actual_tokens
        return replace(
            self,
            query_start_loc=self.query_start_loc[: B + 1],
            seq_lens=self.seq_lens[:B],
            num_computed_tokens_cpu=self.num_computed_tokens_cpu[:B],
            block_table_tensor=self.block_table_tensor[:B],
            slot_mapping=self.slot_mapping[:T],
            positions=self.positions[:T],
            is_prefilling=self.is_prefilling[:B],
            encoder_seq_lens=None if self.encoder_seq_lens is None else self.encoder_seq_lens[:B],
            dcp_local_seq_lens=None if self.dcp_local_seq_lens is None else self.dcp_local_seq_lens[:B],
        )


def common_attention_metadata(
    batch: BatchTensors, group: int = 0, num_logits_padded: int = 0, *, promise: GraphPromise | None = None
) -> CommonAttentionMetadata:
    """Return the step's metadata for one KV group: views of the step's tensors, valid as long as the batch is.

    num_logits_padded: the padded number of logit rows of a captured graph; 0 pads nothing. Padding repeats the last
    index, so that a graph reads no row outside the step.
    promise: the promise of the graph that the step replays. Its max_query_len and max_seq_len are used in place of the
    step's. Raise PlanError for a step that breaks it.
    """
    encoder, padded, num_logits = encoder_seq_lens(batch), batch.num_reqs_padded, len(batch.logits_indices)
    if num_logits_padded and num_logits_padded < num_logits:
        raise PlanError("fewer padded logit rows than logit rows", step=batch.step, tensor="logits_indices_padded",
                        expected=f"{num_logits} or more", got=num_logits_padded)  # fmt: skip
    lengths = batch if promise is None else graph_inputs(batch, promise)
    logits_indices = batch.logits_indices
    if num_logits_padded:
        logits_indices = batch.optional("logits_indices_padded", size=num_logits_padded)
        logits_indices[:num_logits] = batch.logits_indices
        logits_indices[num_logits:] = batch.logits_indices[-1] if num_logits else 0
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_computed_tokens_cpu=batch.padded("num_computed_tokens", padded),
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_tokens,
        max_query_len=lengths.max_query_len,
        max_seq_len=lengths.max_seq_len,
        block_table_tensor=kernel_block_table(batch, group),
        slot_mapping=batch.slot_mapping[group],
        positions=batch.positions,
        is_prefilling=batch.padded("is_prefilling", padded),
        req_idx=batch.idx_mapping,
        logits_indices_padded=logits_indices,
        num_logits_indices=num_logits,
        encoder_seq_lens=encoder if encoder.any() else None,
        dcp_local_seq_lens=batch.dcp_local_seq_lens,
        mm_req_doc_ranges={b: [(i, j - 1) for i, j in r.tolist()] for b, r in ranges_of_requests(batch)} or None,
    )
