"""vLLM's CommonAttentionMetadata, by its own names, for metadata builders written against it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32, I64, Bools

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CommonAttentionMetadata:
    """One KV group of one step. Padding, where the step has it, is included; `unpadded` leaves it out.

    query_start_loc int32 [Bp + 1], seq_lens int32 [Bp], num_computed_tokens_cpu int32 [Bp],
    block_table_tensor int32 [Bp, K] (kernel blocks where they are smaller), slot_mapping int64 [Tp], positions
    int64 [Tp], is_prefilling bool [Bp], req_idx int32 [B] state rows, encoder_seq_lens int32 [Bp] or None,
    dcp_local_seq_lens int32 [Bp] or None, logits_indices_padded int64 [L].
    The host knows every value, so the ``_cpu`` names are the same arrays and the upper bound is exact.
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
        """int32 [T]: the request of each token."""
        lens = np.diff(self.query_start_loc)
        return np.repeat(np.arange(len(lens), dtype=np.int32), lens)

    def unpadded(self) -> CommonAttentionMetadata:
        """The same without padding rows and tokens."""
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


def common_attention_metadata(batch: InputBatch, group: int = 0) -> CommonAttentionMetadata:
    """The step's metadata for one KV group. Views of the step's tensors where they have the shape already: valid as
    long as the batch is.
    """
    encoder = batch.encoder_seq_lens
    padded = batch.num_reqs_padded
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_computed_tokens_cpu=_pad(batch.num_computed_tokens, padded),
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.kernel_block_table(group),
        slot_mapping=batch.slot_mapping[group],
        positions=batch.positions,
        is_prefilling=_pad(batch.is_prefilling, padded),
        req_idx=batch.idx_mapping,
        logits_indices_padded=batch.logits_indices,
        num_logits_indices=len(batch.logits_indices),
        encoder_seq_lens=encoder if encoder.any() else None,
        dcp_local_seq_lens=batch.dcp_local_seq_lens,
    )


def _pad(values: npt.NDArray[_T], size: int) -> npt.NDArray[_T]:
    out = np.zeros(size, values.dtype)
    out[: len(values)] = values
    return out
