"""Pooling requests (embeddings, scores): they have no sampling state, and a result in their last chunk only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch.features.multimodal import requests_with

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What to make of a request's hidden states. task: the pooler's name; dimensions: keep the first so many
    (None: all); normalize: to unit length.
    """

    task: str = "embed"
    dimensions: int | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PoolingMetadata:
    """The pooling requests of a step, P of them, in batch order.

    batch_indices: int64 [P] where they stand in the batch. params: their parameters.
    first_token, last_token: int64 [P] their token rows in this step, both inclusive.
    prompt_lens: int32 [P]. seq_lens: int32 [P] computed + scheduled.
    is_last_chunk: bool [P], seq_len = prompt_len: this step completes the prompt, and so has a result.
    """

    batch_indices: I64
    params: tuple[PoolingParams, ...]
    first_token: I64
    last_token: I64
    prompt_lens: I32
    seq_lens: I32
    is_last_chunk: Bools


def pooling_metadata(states: RequestStates, batch: InputBatch) -> PoolingMetadata:
    """The step's pooling requests; every array empty, and nothing computed, where there are none."""
    by_row = states.extras.pooling_params
    index = np.array(requests_with(by_row, batch.idx_mapping), np.int64)
    rows = batch.idx_mapping[index]
    loc = batch.query_start_loc.astype(np.int64)
    prompt_lens, seq_lens = states.prompt_len[rows], batch.seq_lens[index]
    return PoolingMetadata(
        index,
        tuple(by_row[row] for row in rows.tolist()),
        loc[index],
        loc[index + 1] - 1,
        prompt_lens,
        seq_lens,
        seq_lens == prompt_lens,
    )
