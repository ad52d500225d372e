"""Log-probabilities of prompt tokens, from logits at the positions before them."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I64
from foreword.batch import InputBatch, StepNeeds
from foreword.native import native
from foreword.sampling.logprobs import TokenLogprobs, read_logprobs

NO_TOKENS: I64 = np.zeros(0, np.int64)


def prompt_tokens(batch: InputBatch, step: StepNeeds) -> I64:
    """Return the batch's tokens that are followed by a prompt token, of requests that want prompt log-probabilities."""
    if step.num_prompt_logprobs is None:
        return NO_TOKENS
    wanted = (step.num_prompt_logprobs >= 0)[batch.req_indices]
    rows = batch.idx_mapping[batch.req_indices]
    return np.flatnonzero(wanted & (batch.positions[: batch.num_tokens] + 1 < batch.states.prompt_len[rows]))


def read_prompt_logprobs(
    batch: InputBatch, tokens: I64, logits: F32, threads: native.CpuModel | None = None
) -> dict[int, list[tuple[int, TokenLogprobs]]]:
    """Return, for each state row, pairs of the position of a prompt token and the log-probabilities of it and of the
    likeliest tokens there, in order.

    Row i of logits [n, V] is at batch token tokens[i]. threads: the model whose idle threads compute too.
    """
    states = batch.states
    rows, positions = batch.idx_mapping[batch.req_indices[tokens]], batch.positions[tokens] + 1
    arrays = read_logprobs(
        logits, states.token_ids[rows, positions], states.sampling.num_prompt_logprobs[rows], threads
    )
    found: dict[int, list[tuple[int, TokenLogprobs]]] = {}
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        found.setdefault(row, []).append((position, TokenLogprobs(arrays, i)))
    return found
