"""The rules of a model's generation config: tokens that are never written, and the order of Whisper's timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, I32
from foreword.batch import AddedRow, BatchUpdate, RequestStates
from foreword.sampling.rows import LogitRows, RowValues

IGNORES_RULES = {"generation_config": False}
"""The ``extra_args`` of a request to which the rules do not apply."""


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """The order of tokens in an output with timestamps. first: the token of 0 seconds, all from which on are
    timestamps. end: the token that ends an output, all before which are text. max_initial: the most that an output may
    begin with.

    An output begins with a timestamp. Timestamps come in pairs, but for the last one before the end, and never
    decrease. A timestamp is written where all of them together are likelier than any other token.
    """

    first: int
    end: int
    max_initial: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """suppressed: tokens that are never written; suppressed_first: not as the first token. timestamps: of requests
    whose prompt does not have the token before the first timestamp; None for a model without any.
    """

    suppressed: Sequence[int] = ()
    suppressed_first: Sequence[int] = ()
    timestamps: TimestampRules | None = None

    def __bool__(self) -> bool:
        return bool(self.suppressed or self.suppressed_first or self.timestamps)


class GenerationProcessor:
    """Applies rules to every request but those with `IGNORES_RULES`. Implements `LogitsProcessor`."""

    extra_args = frozenset(IGNORES_RULES)

    def __init__(self, states: RequestStates, rules: GenerationRules) -> None:
        self.rows: RowValues[bool] = RowValues(states.max_num_reqs)
        self._rules = rules
        self._suppressed, self._first = list(rules.suppressed), list(rules.suppressed_first)

    def update(self, change: BatchUpdate) -> None:
        self.rows.update(change, _value)

    def apply(self, logits: F32, at: LogitRows) -> None:
        states, rules = at.states, self._rules
        prompts = states.prompt_len[at.rows]
        counts = states.num_tokens[at.rows] + at.num_drafts - prompts
        logits[:, self._suppressed] = -np.inf
        logits[np.ix_(counts == 0, self._first)] = -np.inf
        if rules.timestamps is None:
            return
        tokens = _tokens(at)
        is_prompt = np.arange(tokens.shape[1]) < prompts[:, None]
        writes = (~((tokens == rules.timestamps.first - 1) & is_prompt).any(1)).nonzero()[0]
        if len(writes):
            part = logits[writes]
            outputs = np.where(is_prompt[writes], -1, tokens[writes])
            _apply_timestamps(part, outputs, prompts[writes] + counts[writes], counts[writes], rules.timestamps)
            logits[writes] = part


def _value(added: AddedRow) -> bool | None:
    given = None if added.params is None else added.params.extra_args
    return None if (given or {}).get("generation_config", True) is False else True


def _tokens(at: LogitRows) -> I32:
    """Return the tokens [N, W] before each row of logits, drafts included, −1 after their end."""
    states, known = at.states, at.states.num_tokens[at.rows]
    columns = np.arange((known + at.num_drafts).max(initial=0))
    found = np.where(columns < known[:, None], states.token_ids[at.rows, : len(columns)], np.int32(-1))
    for i in at.num_drafts.nonzero()[0].tolist():
        start, count = at.first_draft[i], at.num_drafts[i]
        found[i, known[i] : known[i] + count] = at.draft_token_ids[start : start + count]
    return found


def _apply_timestamps(logits: F32, outputs: I32, ends: I32, counts: I32, rules: TimestampRules) -> None:
    """Apply the rules of timestamps to rows of logits [N, V] after outputs of ``counts`` tokens. outputs: [N, W], each
    up to ``ends``, −1 elsewhere.
    """
    first, tokens = rules.first, np.arange(logits.shape[1])
    i = np.arange(len(logits))
    logits[:, first - 1] = -np.inf
    is_begin, has_one = counts == 0, counts < 2
    last, before = outputs[i, ends - 1] >= first, (outputs[i, ends - 2] >= first) | has_one
    logits[(last & before)[:, None] & (tokens >= first)] = -np.inf
    logits[(last & ~before)[:, None] & (tokens < rules.end)] = -np.inf
    latest = outputs.max(1)
    least = np.where(latest < first, first, latest + np.where(last & ~before, 0, 1))
    logits[(tokens >= first) & (tokens < least[:, None])] = -np.inf
    logits[is_begin[:, None] & (tokens < first)] = -np.inf
    if rules.max_initial is not None:
        logits[is_begin[:, None] & (tokens > first + rules.max_initial)] = -np.inf
    with np.errstate(divide="ignore"):
        most = logits[:, first:].max(1, initial=-1e30)
        together = most + np.log(np.exp(logits[:, first:] - most[:, None]).sum(1))
    logits[(together > logits[:, :first].max(1))[:, None] & (tokens < first)] = -np.inf
