"""A step as padded rectangles, for kernels without ragged batches and pages: queries, gathered keys, a mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I64, Bools
from foreword.batch.adapters.page_size_one import token_tables
from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.attention import visible


@dataclass(frozen=True, slots=True, eq=False)
class DenseInputs:
    """Q = max_query_len, N = max_seq_len. Queries are aligned to the left.

    token_indices: int64 [B, Q], the token row of each query; 0 where there is none (its mask row is empty).
    positions: int64 [B, Q]. key_slots: int64 [B, N], the cache slot of each position, 0 past the end.
    mask: bool [B, Q, N], True where the query sees the key.
    out = attention(q[token_indices], k[key_slots], v[key_slots], mask);  row t of the step is
    out[req_indices[t], t − query_start_loc[req_indices[t]]].
    """

    token_indices: I64
    positions: I64
    key_slots: I64
    mask: Bools


def dense_inputs(batch: BatchTensors, group: int = 0) -> DenseInputs:
    """Return the step as rectangles, in O(B · Q · N). Raise PlanError for a group that is spread over ranks."""
    tables = token_tables(batch, group)
    local = np.arange(batch.max_query_len)
    real = local < tables.extend_seq_lens[:, None]
    token_indices = np.where(real, tables.extend_start_loc[:, None] + local, 0)
    positions = np.where(real, tables.extend_prefix_lens[:, None] + local, 0)
    ranges, window = bidirectional_ranges(batch), batch.states.block_tables[group].group.sliding_window
    of_query = None if ranges is None else ranges[token_indices.reshape(-1)]
    mask = visible(positions.reshape(-1), batch.max_seq_len, window, of_query)
    return DenseInputs(
        token_indices,
        positions,
        tables.req_to_token,
        mask.reshape(*positions.shape, batch.max_seq_len) & real[:, :, None],
    )
