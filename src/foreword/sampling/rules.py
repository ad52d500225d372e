"""The rules of `SamplingParams` that change logits, in this order:

allowed ids, bias, minimum length  →  penalties  →  bad words
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import RequestStates, SamplingParams
from foreword.batch.state.batch_update import AddedRow, BatchUpdate
from foreword.batch.state.sampling_columns import Need
from foreword.sampling.rows import LogitRows, RowValues

FORBIDDEN = np.float32(-np.inf)
_RULES = int(Need.ALLOWED_TOKENS | Need.LOGIT_BIAS | Need.MIN_TOKENS | Need.PENALTIES | Need.BAD_WORDS)
_NO_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True, eq=False)
class RequestRules:
    """The rules of one request. `apply` changes a row of logits by them.

    end_ids: tokens that would end the output. A rule that would forbid every token still possible is not applied.
    """

    allowed: I64 | None
    bias_ids: I64
    bias: F32
    min_tokens: int
    end_ids: I64
    repetition: np.float32
    frequency: np.float32
    presence: np.float32
    bad_words: tuple[tuple[int, ...], ...]

    def apply(self, logits: F32, prompt: I32, output: I32) -> None:
        """Change the row [V], from which the token after ``prompt + output`` is chosen."""
        if self.allowed is not None:
            kept = logits[self.allowed]
            if _has_token(kept):
                logits[:] = FORBIDDEN
                logits[self.allowed] = kept
        if len(self.bias_ids):
            _set_unless_none_left(logits, self.bias_ids, logits[self.bias_ids] + self.bias)
        if len(output) < self.min_tokens:
            _set_unless_none_left(logits, self.end_ids, FORBIDDEN)
        self._penalize(logits, prompt, output)
        if self.bad_words:
            _set_unless_none_left(logits, self._bad_ends(prompt, output), FORBIDDEN)

    def _penalize(self, logits: F32, prompt: I32, output: I32) -> None:
        if self.repetition != 1:
            seen = np.union1d(prompt, output)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self.repetition, values * self.repetition)
        if self.frequency or self.presence:
            ids, counts = np.unique(output, return_counts=True)
            logits[ids] -= self.frequency * counts.astype(np.float32) + self.presence

    def _bad_ends(self, prompt: I32, output: I32) -> I64:
        """The last tokens of the bad words whose other tokens are the latest."""
        longest = max(len(word) for word in self.bad_words) - 1
        tail = tuple(np.concatenate([prompt[-longest:], output[-longest:]])[-longest:].tolist()) if longest else ()
        ends = [w[-1] for w in self.bad_words if len(w) == 1 or tail[-(len(w) - 1) :] == w[:-1]]
        return np.array(ends, np.int64)


class RulesProcessor:
    """The logits processor of these rules. A request keeps the parameters that it was admitted with.

    eos_token_ids: the model's end tokens; they end an output unless its parameters say ignore_eos.
    """

    extra_args: frozenset[str] = frozenset()

    def __init__(self, states: RequestStates, eos_token_ids: Iterable[int] = ()) -> None:
        self.rows: RowValues[RequestRules] = RowValues(states.max_num_reqs)
        self._columns = states.sampling
        self._eos_token_ids = frozenset(eos_token_ids)

    def update(self, change: BatchUpdate) -> None:
        self.rows.update(change, self._rules_of)

    def apply(self, logits: F32, at: LogitRows) -> None:
        for i, row in enumerate(at.rows.tolist()):
            self.rows[row].apply(logits[i], at.prompt_token_ids(i), at.output_token_ids(i))

    def _rules_of(self, added: AddedRow) -> RequestRules | None:
        c, row, params = self._columns, added.row, added.params or _NO_PARAMS
        if not c.needs[row] & _RULES:
            return None
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        return RequestRules(
            None if allowed is None else np.unique(_ids(allowed)),
            _ids(list(bias)),
            np.array(list(bias.values()), np.float32),
            int(c.min_tokens[row]),
            _ids(sorted(end_ids)),
            c.repetition_penalty[row],
            c.frequency_penalty[row],
            c.presence_penalty[row],
            tuple(tuple(word) for word in params.bad_words_token_ids if len(word)),
        )


def _ids(ids: Sequence[int]) -> I64:
    return np.array(ids, np.int64)


def _has_token(logits: F32) -> bool:
    return bool((logits > FORBIDDEN).any())


def _set_unless_none_left(logits: F32, ids: I64, values: F32 | np.float32) -> None:
    """logits[ids] = values, undone if no token of the row is possible then."""
    before = logits[ids]
    logits[ids] = values
    if not _has_token(logits):
        logits[ids] = before
