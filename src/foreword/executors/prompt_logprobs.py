"""Log-probabilities of prompt tokens, from logits at the positions before them."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I64
from foreword.batch import InputBatch
from foreword.batch.state.sampling_metadata import SamplingMetadata
from foreword.sampling import TokenLogprobs, token_logprobs

NO_TOKENS: I64 = np.zeros(0, np.int64)


def prompt_tokens(batch: InputBatch, metadata: SamplingMetadata) -> I64:
    """The batch's tokens that are followed by a prompt token, of requests that want prompt log-probabilities."""
    if metadata.num_prompt_logprobs is None:
        return NO_TOKENS
    wanted = (metadata.num_prompt_logprobs >= 0)[batch.req_indices]
    rows = batch.idx_mapping[batch.req_indices]
    return np.flatnonzero(wanted & (batch.positions[: batch.num_tokens] + 1 < batch.states.prompt_len[rows]))


def read_prompt_logprobs(batch: InputBatch, tokens: I64, logits: F32) -> dict[int, list[tuple[int, TokenLogprobs]]]:
    """State row → (position of a prompt token, its log-probability and the likeliest tokens there), in order.

    Row i of logits [n, V] is at batch token tokens[i].
    """
    states = batch.states
    found: dict[int, list[tuple[int, TokenLogprobs]]] = {}
    for i, t in enumerate(tokens.tolist()):
        row, position = int(batch.idx_mapping[batch.req_indices[t]]), int(batch.positions[t]) + 1
        count = int(states.sampling.num_prompt_logprobs[row])
        entry = token_logprobs(logits[i], int(states.token_ids[row, position]), count)
        found.setdefault(row, []).append((position, entry))
    return found
