"""The definition of sampling, in NumPy: native code computes the same, and this code runs if native code is not built.

From a row of logits z [V], for the token at position p, after a text of prompt and output (drafts before p included):

    1  token mask           z = −∞ where the grammar forbids the token
    2  allowed_token_ids    z = −∞ for all others
    3  logit_bias           z += bias
    4  min_tokens           z = −∞ for the tokens that would end an output shorter than this
    5  repetition_penalty   z = z / r where z > 0, else z · r, for tokens of the text
    6  frequency_penalty,   z −= f · (occurrences in the output) + q, for tokens of the output
       presence_penalty
    7  DRY                  z −= multiplier · base^(m − allowed_length), for tokens that would extend a repetition of m
                            tokens, m ≥ allowed_length: the last m tokens of the text came before this token already;
                            the longest such m within the last `dry_range` tokens and behind the last breaker
    8  bad_words            z = −∞ for the last token of a word whose other tokens end the text
    9  custom processors    in the order given to the engine
   10  temperature          z = z / temperature; 0: the most likely token, lowest id first, and nothing below

    With p = softmax(z), and tokens in descending order, lower ids first among equals:

   11  min_p                keep p ≥ min_p · max p
   12  top_n_sigma          keep z ≥ max z − n · (standard deviation of the finite z)
   13  top_k                of these, keep the first k
   14  top_p                of these, renormalised, keep the shortest prefix with at least this probability
   15  typical_p            of these, renormalised, order by |log p − Σ p log p|: the shortest prefix with at least this
   16  XTC                  of these, renormalised: if at least two have p ≥ xtc_threshold, drop all of them but the
                            last; with the probability xtc_probability, as u(seed, p, −1) of `uniform_noise` decides
   17  draw                 argmax of z + `gumbel_noise`(seed, p, token)
   18  log-probabilities    of the model's own logits, before 1

The filters that keep a prefix of the order come first (11 to 14), in the order of the cheapest test, so that no
vocabulary is sorted; the two that may drop the most likely tokens (15, 16) work on what is left, because they are meant
to choose among plausible tokens. A rule of 2 to 4 and 8 that would leave no token is not applied. Rules compute in
float32, everything from 10 on in float64. A row whose own logits have a NaN or an infinite maximum, and one in which
the mask or processors leave nothing, gives the token −1.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import F32, F64, I32, I64, AnyArray, Bools, Floats, Ints
from foreword.sampling.logprobs import row_logprobs
from foreword.sampling.noise import gumbel_noise, uniform_noise
from foreword.sampling.rules import RequestRules
from foreword.sampling.verification import accepted_tokens

FORBIDDEN = np.float32(-np.inf)
_MOST_PENALTY = 1e30  # penalized logits stay finite


def kept_tokens(
    logits: Floats,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_n_sigma: float = 0.0,
    xtc_threshold: float = 1.0,
) -> I64:
    """Return the token ids that may be drawn, ascending, of one row of temperature-scaled logits [V]: lines 11 to 16
    above.

    XTC applies, whatever its chance; above 0.5 it has no effect. At least one token is kept, none of probability 0.
    """
    finite = np.flatnonzero(logits > -np.inf)
    z: F64 = logits[finite].astype(np.float64)
    top = z.max()
    threshold = top + np.log(min_p) if min_p > 0 else -np.inf
    if top_n_sigma > 0:
        threshold = max(threshold, top - top_n_sigma * z.std())
    order = np.argsort(-z, kind="stable")
    order = order[z[order] >= threshold][: top_k or None]
    p = np.exp(z - top)
    if top_p < 1:
        order = _prefix(order, p, top_p)
    if typical_p < 1:
        share, log_p = p[order] / p[order].sum(), z[order] - top
        distance = np.abs(log_p - (share * log_p).sum())
        order = order[np.sort(_prefix(np.argsort(distance, kind="stable"), p[order], typical_p))]
    above = np.flatnonzero(p[order] >= xtc_threshold * p[order].sum())
    if len(above) > 1:
        order = order[above[-1] :]
    return np.sort(finite[order])


def _prefix(order: I64, p: F64, share: float) -> I64:
    """Return the fewest first tokens of the order that have this share of the order's probability."""
    reached = np.cumsum(p[order])
    return order[: int(np.searchsorted(reached, share * reached[-1])) + 1]


def draw_token(logits: Floats, position: int, params: Any) -> int:
    """Return the token drawn from one row of changed logits [V] (lines 10 to 17), or −1.

    params: the columns of `SamplingColumns` as attributes.
    """
    if not np.isfinite(logits.max()):
        return -1
    if not params.temperature > 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / float(params.temperature)
    chance = uniform_noise(int(params.seed), position, np.array([-1]))[0]
    kept = kept_tokens(
        scaled,
        top_k=max(int(params.top_k), 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        typical_p=float(params.typical_p),
        top_n_sigma=float(params.top_n_sigma),
        xtc_threshold=float(params.xtc_threshold) if chance < params.xtc_probability else 1.0,
    )
    return int(kept[(scaled[kept] + gumbel_noise(int(params.seed), position, kept)).argmax()])


def apply_rules(logits: F32, rules: RequestRules, params: Any, prompt: I32, output: I32) -> None:
    """Change a row of logits [V] for the token after ``prompt + output``: lines 2 to 8.

    params: the columns of `SamplingColumns` as attributes.
    """
    if rules.allowed is not None:
        others = np.setdiff1d(np.arange(len(logits)), rules.allowed)
        _set_unless_none_left(logits, others, FORBIDDEN)
    _set_unless_none_left(logits, rules.bias_ids, logits[rules.bias_ids] + rules.bias)
    if len(output) < params.min_tokens:
        _set_unless_none_left(logits, rules.end_ids, FORBIDDEN)
    if params.repetition_penalty != 1:
        seen = np.union1d(prompt, output)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= params.frequency_penalty * counts.astype(np.float32) + params.presence_penalty
    text = np.concatenate([prompt, output]).tolist()
    if params.dry_multiplier > 0:
        for token, m in _repetitions(text, set(rules.dry_breakers.tolist()), int(params.dry_range)).items():
            if m >= params.dry_allowed_length:
                with np.errstate(over="ignore"):
                    growth = np.float64(params.dry_base) ** (m - int(params.dry_allowed_length))
                logits[token] -= np.float32(min(float(params.dry_multiplier) * growth, _MOST_PENALTY))
    words = np.split(rules.bad_words, rules.bad_word_ends[:-1]) if len(rules.bad_word_ends) else []
    ends = [w[-1] for w in words if len(w) - 1 <= len(text) and text[len(text) - len(w) + 1 :] == w[:-1].tolist()]
    _set_unless_none_left(logits, np.array(ends, np.int64), FORBIDDEN)


def _repetitions(text: list[int], breakers: set[int], most: int) -> dict[int, int]:
    """Return, by token, the longest m for which the last m tokens of the text come before an occurrence of it."""
    text = text[len(text) - min(most, len(text)) :] if most >= 0 else text
    found: dict[int, int] = {}
    for i in range(1, len(text)):
        m = 0
        while m < i and text[-1 - m] == text[i - 1 - m] and text[-1 - m] not in breakers:
            m += 1
        found[text[i]] = max(m, found.get(text[i], 0))
    return found


def _set_unless_none_left(logits: F32, ids: Ints, values: F32 | np.float32) -> None:
    """Set logits[ids] = values, and undo it if no token of the row is possible then."""
    before = logits[ids]
    logits[ids] = values
    if not (logits > FORBIDDEN).any():
        logits[ids] = before


class StepArrays(NamedTuple):
    """The inputs of a step's sampling.

    logits: [L, V]. rows: int32 [B] state rows. starts: int32 [B], the first position that the step computes; tokens
    before it have not changed since they were computed. cu_num_logits: int32 [B + 1]. positions: int64 [L], which the
    drawn tokens take. drafts: int32 [L − B], request by request. is_embedding: bool [R, M] or None. masked: int32 [N],
    ascending rows of logits with a mask; words: int32 [N, ceil(V / 32)]; both are None if there are no masks.
    """

    logits: F32
    rows: I32
    starts: I32
    cu_num_logits: I32
    positions: I64
    drafts: I32
    is_embedding: Bools | None
    masked: I32 | None
    words: I32 | None


class ReferenceRows:
    """The rules of requests by state row, and the sampling of steps: the same methods as native `SamplingRows`.

    columns: the arrays of `SamplingColumns` by name; they and the others are kept, and read in every call.
    """

    def __init__(
        self, columns: dict[str, AnyArray], token_ids: I32, prompt_len: I32, num_tokens: I32, vocab_size: int
    ) -> None:
        self._columns, self._token_ids, self._prompt_len, self._num_tokens = columns, token_ids, prompt_len, num_tokens
        self._rules: dict[int, RequestRules] = {}

    def set(self, row: int, *rules: Any) -> None:
        """Set the `RequestRules` of the request in this row."""
        self._rules[row] = RequestRules(*rules)

    def forget(self, row: int) -> None:
        """Drop the rules of a row."""
        self._rules.pop(row, None)

    def change(self, *arguments: Any) -> None:
        """Write rows of logits after lines 1 to 8, of the arguments (*StepArrays, changed_rows, changed, model).

        changed_rows: int32 [n], ascending. changed: float32 [n, V].
        """
        step, (changed_rows, changed, _) = StepArrays(*arguments[:9]), arguments[9:]
        for i, logits in self._changed(step):
            changed[changed_rows == i] = logits

    def sample(self, *arguments: Any) -> None:
        """Draw, of the arguments (*StepArrays, changed_rows, changed, out, offsets, ids, logprobs, ranks, model).

        changed_rows, changed: rows of logits that were changed already; None if there are none. out: int32 [B, W], the
        tokens to
        commit as `accepted_tokens` returns them. offsets: int64 [L + 1], where the log-probabilities of each row of
        logits are in the other arrays: its token's first, then the likeliest; None for none.
        """
        step = StepArrays(*arguments[:9])
        changed_rows, changed, out, offsets, ids, logprobs, ranks, _ = arguments[9:]
        given = {} if changed is None else dict(zip(changed_rows.tolist(), changed, strict=True))
        at = np.repeat(step.rows, np.diff(step.cu_num_logits)).tolist()
        drawn = np.full(len(step.logits), -1, np.int32)
        for i, own in self._changed(step):
            columns = SimpleNamespace(**{name: column[at[i]] for name, column in self._columns.items()})
            drawn[i] = draw_token(given.get(i, own), int(step.positions[i]), columns)
        out[:] = accepted_tokens(drawn, step.drafts, step.cu_num_logits, out.shape[1])
        for i in np.flatnonzero(np.diff(offsets)).tolist() if offsets is not None else ():
            if drawn[i] >= 0:
                span = slice(offsets[i], offsets[i + 1])
                ids[span], logprobs[span], ranks[span] = row_logprobs(
                    step.logits[i], int(drawn[i]), span.stop - span.start - 1
                )

    def _changed(self, step: StepArrays) -> Iterator[tuple[int, F32]]:
        """Yield every row of logits after lines 1 to 8."""
        masks: dict[int, I32] = {}
        if step.masked is not None and step.words is not None:
            wanted = len(step.masked), -(-step.logits.shape[1] // 32)
            if step.words.shape != wanted:
                raise ValueError(f"words has shape {step.words.shape}, expected {wanted}")
            masks = dict(zip(step.masked.tolist(), step.words, strict=True))
        for b, row in enumerate(step.rows.tolist()):
            first, end = step.cu_num_logits[b : b + 2].tolist()
            prompt_len, num_tokens = int(self._prompt_len[row]), int(self._num_tokens[row])
            tokens = self._token_ids[row, :num_tokens]
            prompt = tokens[:prompt_len]
            if step.is_embedding is not None:
                prompt = prompt[~step.is_embedding[row, :prompt_len]]
            columns = SimpleNamespace(**{name: column[row] for name, column in self._columns.items()})
            for i in range(first, end):
                logits = step.logits[i].copy()
                if step.positions[first] >= num_tokens and np.isfinite(logits.max()):
                    if i in masks:
                        octets = np.ascontiguousarray(masks[i], "<i4").view(np.uint8)
                        allowed = np.unpackbits(octets, count=len(logits), bitorder="little").view(np.bool_)
                        logits = np.where(allowed, logits, FORBIDDEN)
                    if row in self._rules:
                        output = np.concatenate([tokens[prompt_len:], step.drafts[first - b : i - b]])
                        apply_rules(logits, self._rules[row], columns, prompt, output)
                yield i, logits
