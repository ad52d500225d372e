"""Pooling requests (embeddings, scores): they have no sampling state, and a result in their last chunk only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch.features.multimodal import prefilling_with
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.pooling import PoolingParams, PoolingState


@dataclass(frozen=True, slots=True, eq=False)
class PoolingMetadata:
    """The pooling requests of a step, P of them, in batch order.

    batch_indices: int64 [P]. params: their parameters. states: the hidden states of earlier chunks.
    first_token, last_token: int64 [P] their token rows in this step, both inclusive.
    prompt_lens: int32 [P]. seq_lens: int32 [P] computed + scheduled.
    is_last_chunk: bool [P], seq_len = prompt_len: this step completes the prompt, and so has a result.
    """

    batch_indices: I64
    params: tuple[PoolingParams, ...]
    states: tuple[PoolingState, ...]
    first_token: I64
    last_token: I64
    prompt_lens: I32
    seq_lens: I32
    is_last_chunk: Bools


def pooling_metadata(batch: BatchTensors) -> PoolingMetadata:
    """Return the step's pooling requests; every array empty, and nothing computed, where there are none."""
    extras = batch.states.extras
    index = np.array(prefilling_with(extras.pooling_params, batch), np.int64)
    rows = batch.idx_mapping[index]
    loc = batch.query_start_loc.astype(np.int64)
    prompt_lens, seq_lens = batch.states.prompt_len[rows], batch.seq_lens[index]
    return PoolingMetadata(
        index,
        tuple(extras.pooling_params[row] for row in rows.tolist()),
        tuple(extras.pooling_states[row] for row in rows.tolist()),
        loc[index],
        loc[index + 1] - 1,
        prompt_lens,
        seq_lens,
        seq_lens == prompt_lens,
    )
