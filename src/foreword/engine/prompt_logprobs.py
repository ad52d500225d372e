"""Log-probabilities of a prompt: logits at every position of the chunks of those who asked."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch, RequestStates
from foreword.sampling import TokenLogprobs, token_logprobs

# row → (position of the prompt token, its log-probability and the likeliest tokens there), in order
PromptLogprobs = dict[int, list[tuple[int, TokenLogprobs]]]

NO_TOKENS = np.zeros(0, np.int64)


class _MoreLogits:
    """A batch that asks for logits at other tokens, and is the given one in everything else."""

    def __init__(self, batch: InputBatch, logits_indices: I64) -> None:
        self._batch, self.logits_indices = batch, logits_indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def prompt_tokens(states: RequestStates, batch: InputBatch, prefilling: I32) -> I64:
    """The batch's tokens that a prompt token follows, of ``prefilling`` rows that want prompt log-probabilities."""
    if not len(prefilling):
        return NO_TOKENS
    asking = prefilling[states.sampling.num_prompt_logprobs[prefilling] >= 0]
    if not len(asking):
        return NO_TOKENS
    rows = batch.idx_mapping[batch.req_indices]
    positions = batch.positions[: batch.num_tokens]
    return np.flatnonzero(np.isin(rows, asking) & (positions + 1 < states.prompt_len[rows]))


def with_more_logits(batch: InputBatch, tokens: I64) -> InputBatch:
    """The batch with logits at ``tokens`` too, after its own."""
    return cast(InputBatch, _MoreLogits(batch, np.concatenate([batch.logits_indices, tokens])))


def read_prompt_logprobs(states: RequestStates, batch: InputBatch, tokens: I64, logits: F32) -> PromptLogprobs:
    """Row i of logits [n, V], at batch token tokens[i], says how likely the prompt token after it was."""
    found: PromptLogprobs = {}
    for i, t in enumerate(tokens.tolist()):
        row, position = int(batch.idx_mapping[batch.req_indices[t]]), int(batch.positions[t]) + 1
        count = int(states.sampling.num_prompt_logprobs[row])
        entry = token_logprobs(logits[i], int(states.token_ids[row, position]), count)
        found.setdefault(row, []).append((position, entry))
    return found
