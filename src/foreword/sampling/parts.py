"""Draw tokens from logits whose vocabulary is divided among ranks: each rank draws from its part, and the largest draw
is taken.

Drawing is taking the largest of logit / temperature + noise, and the noise is a function of seed, position and token.
So the largest of the ranks' largest is the token that one rank draws from all logits. Its log-probability follows from
the sums of the parts, and its rank from the number of larger logits in each part; the likeliest tokens of the
vocabulary are among the likeliest tokens of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreword.arrays import F32, F64
from foreword.batch import InputBatch, Need, RequestStates
from foreword.sampling.failures import BadLogitsError
from foreword.sampling.logprobs import LogprobArrays, read_logprobs
from foreword.sampling.noise import gumbel_of_each, seeds_from
from foreword.sampling.processors import StepSampling
from foreword.sampling.row_rules import make_rows
from foreword.sampling.sampler import Failure, Sampled, failed_requests, wanted_logprobs
from foreword.sampling.verification import accepted_tokens

_LACKS = ~int(Need.GREEDY | Need.RANDOM | Need.LOGPROBS)
_MOST_LOGPROBS = 128  # with more, the logits themselves are not much more
LARGEST, SCORE, TOKEN, LOGIT = range(4)  # the columns of a part's draws


def can_be_divided(sampling: StepSampling) -> bool:
    """Return whether a step's tokens can be drawn in parts: no request needs the order of a whole row of logits or
    changes it.
    """
    is_plain = sampling.masks is None and not sampling.processors and not sampling.step.needs & _LACKS
    return is_plain and sampling.step.max_num_logprobs <= _MOST_LOGPROBS


class PartDraws:
    """The draws of one rank, for requests in ``states``. part: its tokens of the vocabulary."""

    def __init__(self, states: RequestStates, part: range) -> None:
        self.states, self._first = states, part.start
        self._seeds = np.zeros_like(states.sampling.seed)
        self._rows = make_rows(states, len(part), seed=self._seeds)

    def draw(self, batch: InputBatch, logits: F32) -> F64:
        """Return of each row of logits [L, part], float64 [L, 4]: the largest logit, the drawn token's logit /
        temperature + noise, that token, and its logit.
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
        logit = logits[np.arange(count), token].astype(np.float64)
        score = logit / np.where(is_random, temperature, 1)
        score += np.where(is_random, gumbel_of_each(seeds, at + 1, token + self._first), 0)
        found = logits.max(axis=1), np.where(has_token, score, -np.inf), token + self._first, logit
        return np.stack([x.astype(np.float64) for x in found], axis=1)

    def logprobs(self, logits: F32, drawn: F64, count: int) -> F64:
        """Return what log-probabilities take from rows of logits [L, part], float64 [L, 2, 1 + count]: log Σ exp, then
        the logits of the ``count`` likeliest tokens; the number of logits that are larger than drawn[i], then these
        tokens. The logits are −∞ past the last token of the part.

        drawn: the logit of the token that was drawn from all parts.
        """
        rows, width = len(logits), min(count, logits.shape[1])
        likeliest = read_logprobs(logits, np.zeros(rows, np.int32), np.full(rows, width))
        ids = likeliest.ids.reshape(rows, 1 + width)
        values = np.take_along_axis(logits, ids.astype(np.int64), axis=1).astype(np.float64)
        out = np.full((rows, 2, 1 + count), -np.inf)
        out[:, 0, 0], out[:, 1, 0] = _log_sums(logits), (logits > drawn[:, None]).sum(axis=1)
        out[:, 0, 1 : 1 + width], out[:, 1, 1 : 1 + width] = values[:, 1:], ids[:, 1:] + self._first
        return out


def best_of(found: Sequence[F64]) -> F64:
    """Return the draws of the whole vocabulary from the draws of all parts, in their order; token −1 where no number is
    finite.
    """
    parts = np.stack(found)
    best = parts[:, :, SCORE].argmax(axis=0)  # the first among equals: the lowest token
    drawn: F64 = parts[best, np.arange(len(best))]
    drawn[~np.isfinite(parts[:, :, LARGEST].max(axis=0)), TOKEN] = -1
    return drawn


def sampled_from(batch: InputBatch, draws: F64, sampling: StepSampling, logprobs: Sequence[F64] = ()) -> Sampled:
    """Return the step's tokens from `best_of`, and their log-probabilities from `PartDraws.logprobs` of all parts."""
    width = int(np.diff(batch.cu_num_logits).max())
    drawn = draws[:, TOKEN].astype(np.int32)
    tokens = accepted_tokens(drawn, batch.draft_token_ids, batch.cu_num_logits, width)
    failures: dict[int, Failure] = dict.fromkeys(failed_requests(batch, tokens[:, 0]), BadLogitsError)
    wanted = None
    if logprobs:
        wanted = wanted_logprobs(batch, sampling, tokens)
        _fill(wanted.arrays, draws, np.stack(logprobs))
    return Sampled(tokens if width > 1 else tokens[:, 0], wanted or {}, failures=failures)


def _fill(arrays: LogprobArrays, draws: F64, parts: F64) -> None:
    """Write the entries of all rows. parts: [parts, L, 2, 1 + count]"""
    total = np.logaddexp.reduce(parts[:, :, 0, 0], axis=0)[:, None]
    values, ids = (parts[:, :, i, 1:].transpose(1, 0, 2).reshape(len(draws), -1) for i in (0, 1))
    count = parts.shape[3] - 1
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]  # tokens ascend from part to part
    values, ids = np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)
    is_first = np.ones_like(values, np.bool_)
    is_first[:, 1:] = values[:, 1:] != values[:, :-1]
    ranks = np.maximum.accumulate(np.where(is_first, np.arange(1, count + 1), 0), axis=1)
    has_entry = np.arange(1 + count) < np.diff(arrays.offsets)[:, None]
    rank = 1 + parts[:, :, 1, 0].sum(axis=0)
    arrays.ids[:] = np.column_stack([draws[:, TOKEN], ids])[has_entry]
    arrays.logprobs[:] = (np.column_stack([draws[:, LOGIT], values]) - total)[has_entry]
    arrays.ranks[:] = np.column_stack([rank, ranks])[has_entry]


def _log_sums(logits: F32) -> F64:
    """Return log Σ exp of each row [L, part]."""
    top = logits.max(axis=1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore"):
        sums: F64 = np.log(np.exp(logits - np.where(np.isfinite(top), top, 0)).sum(axis=1)) + top[:, 0]
    return sums
