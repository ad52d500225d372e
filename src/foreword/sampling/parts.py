"""Draws of tokens from logits whose vocabulary is divided among ranks: each draws from its part, the best draw counts.

Drawing is taking the largest of logit / temperature + noise, and the noise is a function of seed, position and token.
So the largest of the ranks' largest is the token that one rank draws from all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreword.arrays import F32, F64, I32
from foreword.batch import InputBatch, RequestStates
from foreword.batch.state.sampling_columns import Need
from foreword.native import available, native
from foreword.sampling.failures import BadLogitsError
from foreword.sampling.noise import gumbel_of_each, seeds_from
from foreword.sampling.processors import StepSampling
from foreword.sampling.reference import ReferenceRows
from foreword.sampling.sampler import Failure, Sampled, failed_requests
from foreword.sampling.verification import accepted_tokens

_LACKS = ~int(Need.GREEDY | Need.RANDOM)


def can_be_divided(sampling: StepSampling) -> bool:
    """Whether a step's tokens can be drawn so: nothing looks at the order of a whole row of logits, or changes it."""
    return sampling.masks is None and not sampling.processors and not sampling.metadata.needs & _LACKS


class PartDraws:
    """The draws of one rank, for requests in ``states``. part: its tokens of the vocabulary."""

    def __init__(self, states: RequestStates, part: range) -> None:
        self.states, self._first = states, part.start
        self._seeds = np.zeros_like(states.sampling.seed)
        columns = {name: array for name, (array, _) in states.sampling.native_layout()["columns"].items()}
        make: Any = native.SamplingRows if available() else ReferenceRows
        self._rows = make(
            columns | {"seed": self._seeds}, states.token_ids, states.prompt_len, states.num_tokens, len(part)
        )

    def draw(self, batch: InputBatch, logits: F32) -> F64:
        """Of each row of logits [L, part], float64 [L, 3]: the largest logit, the drawn token's logit / temperature +
        noise, and that token.
        """
        rows, count = batch.expanded_idx_mapping, len(logits)
        at = batch.positions.take(batch.logits_indices)
        seeds, temperature = self.states.sampling.seed[rows], self.states.sampling.temperature[rows]
        self._seeds[rows] = seeds_from(seeds, self._first)
        drawn, none = np.empty((count, 1), np.int32), (None,) * 5
        starts, ends, drafts = at.astype(np.int32), np.arange(count + 1, dtype=np.int32), np.empty(0, np.int32)
        self._rows.sample(logits, rows, starts, ends, at + 1, drafts, *none, drawn, *none)
        token = drawn[:, 0]
        is_random, has_token = temperature > 0, token >= 0
        score = logits[np.arange(count), token].astype(np.float64) / np.where(is_random, temperature, 1)
        score += np.where(is_random, gumbel_of_each(seeds, at + 1, token + self._first), 0)
        found = logits.max(axis=1), np.where(has_token, score, -np.inf), token + self._first
        return np.stack([x.astype(np.float64) for x in found], axis=1)


def best_draws(batch: InputBatch, found: Sequence[F64]) -> Sampled:
    """The step's tokens from the draws of all ranks, in their order."""
    largest, score, token = np.stack(found).transpose(2, 0, 1)
    best = score.argmax(axis=0)  # the first among equals: the lowest token
    drawn: I32 = np.where(np.isfinite(largest.max(axis=0)), token[best, np.arange(len(best))], -1).astype(np.int32)
    width = int(np.diff(batch.cu_num_logits).max())
    tokens = accepted_tokens(drawn, batch.draft_token_ids, batch.cu_num_logits, width)
    failures: dict[int, Failure] = dict.fromkeys(failed_requests(batch, tokens[:, 0]), BadLogitsError)
    return Sampled(tokens if width > 1 else tokens[:, 0], {}, failures=failures)
