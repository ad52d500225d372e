"""Sampling parameters of a request."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np

from foreword.batch.values.integers import INT32_MAX
from foreword.batch.values.structured_outputs import structured_outputs
from foreword.errors import RequestError, known_keywords

MAX_ITEMS = 1 << 20  # of a list: more than any vocabulary has


@known_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when its output ends. `foreword.sampling.reference` has the order.

    n: completions per prompt. best_of: candidates from which the n are chosen, by the largest mean log-probability of
    their tokens under the unchanged logits (None: n).
    temperature: divides the logits; 0 is greedy, whatever the filters. top_k: keep the k most likely tokens (0: all).
    top_p: keep the smallest set of most likely tokens with at least this probability. min_p: keep tokens with at least
    min_p times the largest probability. top_n_sigma: keep logits of at least the largest less n standard deviations of
    them all (0 or less: all). typical_p: keep the smallest set with this probability of the tokens whose
    log-probability is nearest to the expected one. xtc_probability, xtc_threshold: with this chance, drop all but the
    least likely of the tokens with at least this probability.
    presence_penalty: subtracted from the logits of tokens in the output. frequency_penalty: the same, per occurrence.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
    dry_multiplier, dry_base, dry_allowed_length: a token that would extend a repetition of m tokens, m at least
    dry_allowed_length, loses dry_multiplier · dry_base^(m − dry_allowed_length) (multiplier 0: off). dry_range: the
    latest tokens in which repetitions are searched (−1: all, 0: none). dry_sequence_breakers: strings over which no
    repetition extends, each by the last token of its encoding (None: newline, colon, quote and asterisk where there is
    a tokenizer). dry_breaker_token_ids: the same as token ids.
    seed: equal seeds and prompts give equal tokens, whatever else is in the batch (None: derived per admission).
    max_tokens: of the output; None: up to the model's length. min_tokens: no end token and no stop before this many.
    stop: strings that end the output. stop_token_ids: tokens that end it. ignore_eos: the model's end tokens do not.
    logprobs, prompt_logprobs: alternatives reported with each token (None: no log-probabilities, −1: all tokens).
    bad_words, bad_words_token_ids: sequences that are never completed, as strings and as token ids.
    allowed_token_ids: the only tokens that may be chosen. logit_bias: token id → value added to its logit.
    skip_special_tokens: the text is without special tokens. spaces_between_special_tokens: False joins the texts of
    added tokens next to each other, where the vocabulary writes a space before each. detokenize: make text at all.
    truncate_prompt_tokens: keep only the last ones of the prompt, this many; −1: as many as leave room for max_tokens.
    structured_outputs: what the output looks like: a mapping such as {"json": schema}; see `StructuredOutputs.of`.
    thinking_end: the text, or the token id, that ends a first part of the output; structured outputs begin after it.
    thinking_start: the text, or the id, of the token that begins this part; an output that begins otherwise has no such
    part (None: every output begins inside it). thinking_budget: most tokens of it before thinking_end, which is then
    forced (None: no limit).
    extra_args: arguments of custom logits processors, by name.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = -1
    dry_sequence_breakers: Sequence[str] | None = None
    dry_breaker_token_ids: Sequence[int] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: object | None = None
    thinking_end: str | int | None = None
    thinking_start: str | int | None = None
    thinking_budget: int | None = None
    extra_args: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        """Make values of what was given: tuples and dictionaries of their own, and plain numbers, as far as possible.

        What is left is refused by `check`.
        """
        for field, convert in _CONVERSIONS:
            value = getattr(self, field)
            if type(value) in _PLAIN or value is _EMPTY:
                continue
            if value is not None:
                object.__setattr__(self, field, convert(value))
            elif field in _LISTS:
                object.__setattr__(self, field, ())

    def with_values(self, **values: Any) -> SamplingParams:
        """A copy with other values of some fields, which are not converted and not checked."""
        other = object.__new__(SamplingParams)
        for field in _FIELDS:
            object.__setattr__(other, field, values[field] if field in values else getattr(self, field))
        return other

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar has to be made for the output: of its structure, of a thinking part before it, or both."""
        return self.structured_outputs is not None or self.thinking_end is not None

    @property
    def has_mappings(self) -> bool:
        """Whether a field holds a mapping, the only kind of value that can change."""
        return self.logit_bias is not None or self.extra_args is not None or self.structured_outputs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, request_id: str | None = None, vocab_size: int | None = None) -> None:
        """Raise `RequestError` for the first value out of range."""

        def require(ok: bool, field: str, value: object, reason: str, fix: str) -> None:
            if not ok:
                raise RequestError(request_id, field, value, reason, fix)

        for field, is_optional in _INTEGERS:
            value = getattr(self, field)
            if not (type(value) is int or (is_optional and value is None) or _is_integer(value)):
                require(False, field, value, "expected an integer", "Give an integer" + " or None." * is_optional)
        require(self.n >= 1, "n", self.n, "must be at least 1", "Use 1 or more.")
        require(
            self.best_of is None or self.best_of >= self.n,
            "best_of", self.best_of, f"must be at least n = {self.n}", "Raise best_of or lower n.",
        )  # fmt: skip
        for field, low, high, fix in _RANGES:
            value = getattr(self, field)
            if not (_is_number(value) and low <= value <= high):
                require(False, field, value, f"must be in [{low:g}, {high:g}]", fix)
        for field in ("top_p", "typical_p"):
            value = getattr(self, field)
            require(value > 0, field, value, "must be above 0", "Use 1.0 for no limit.")
        require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or more", "Use 0 for no limit.")
        for field, least, fix in (
            ("dry_allowed_length", 1, "Use 2 for repetitions of two tokens and more."),
            ("dry_range", -1, "Use −1 for the whole context, 0 for none."),
        ):
            value = getattr(self, field)
            require(least <= value <= INT32_MAX, field, value, f"must be {least} or more, and fit int32", fix)
        require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens", self.max_tokens, "must be at least 1", "Use 1 or more, or None for no limit.",
        )  # fmt: skip
        require(
            0 <= self.min_tokens <= INT32_MAX, "min_tokens", self.min_tokens, "must be 0 or more, and fit int32",
            "Use 0 for none.",
        )  # fmt: skip
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"is above max_tokens = {self.max_tokens}", "Lower it or raise max_tokens.",
        )  # fmt: skip
        require(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed", self.seed, "must fit int64", "Use a seed in [−2^63, 2^63).",
        )  # fmt: skip
        for field in _FLAGS:
            value = getattr(self, field)
            require(type(value) is bool, field, value, "expected a bool", "Give True or False.")
        kept = self.truncate_prompt_tokens
        require(
            kept is None or kept == -1 or kept >= 1,
            "truncate_prompt_tokens", kept, "must be at least 1, or −1",
            "Use None for the whole prompt, −1 for all that leaves room for the output.",
        )  # fmt: skip
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            require(value is None or value >= -1, field, value, "must be −1 or more", "Use None for none, −1 for all.")
        require(_are_strings(self.stop), "stop", self.stop, "expected a string or a list of strings", "Give strings.")
        require(all(self.stop_strings), "stop", self.stop, "contains an empty string", "Remove it.")
        extra = self.extra_args
        for field in ("bad_words", "dry_sequence_breakers"):
            words = getattr(self, field)
            words = () if words is None else words
            is_list = _are_strings(words) and not isinstance(words, str)
            require(is_list, field, words, "expected a list of strings", "Give a list.")
            require(all(words), field, words, "contains an empty string", "Remove it.")
        require(
            extra is None or (isinstance(extra, Mapping) and all(isinstance(name, str) for name in extra)),
            "extra_args", extra, "expected a mapping from names to values", "Give a dictionary with string keys.",
        )  # fmt: skip
        end, budget = self.thinking_end, self.thinking_budget
        for field, mark, like in (
            ("thinking_end", end, "</think>"),
            ("thinking_start", self.thinking_start, "<think>"),
        ):
            require(
                mark is None or (isinstance(mark, str) and mark != "") or _is_integer(mark),
                field, mark, "expected a text that is not empty, or a token id", f'Give one, such as "{like}".',
            )  # fmt: skip
        require(
            self.thinking_start is None or end is not None,
            "thinking_start", self.thinking_start, "needs thinking_end, the text that ends the thinking", "Give both.",
        )  # fmt: skip
        require(
            budget is None or 0 <= budget <= INT32_MAX,
            "thinking_budget", budget, "must be 0 or more, and fit int32", "Use None for no limit.",
        )  # fmt: skip
        require(
            budget is None or end is not None,
            "thinking_budget", budget, "needs thinking_end, the text that ends the thinking", "Give both.",
        )  # fmt: skip
        if vocab_size is not None:
            self._check_ids(request_id, vocab_size)

    def _check_ids(self, request_id: str | None, vocab_size: int) -> None:
        def refuse(field: str, value: object, reason: str, fix: str) -> NoReturn:
            raise RequestError(request_id, field, value, reason, fix)

        def check(field: str, ids: object) -> None:
            if not isinstance(ids, tuple):
                refuse(field, ids, "expected a list of token ids", "Give a list.")
            for token in ids:
                if not _is_integer(token) or not 0 <= token < vocab_size:
                    refuse(field, token, f"expected a token id in [0, {vocab_size})", "Remove it.")

        bias, words = self.logit_bias, self.bad_words_token_ids
        if bias is not None and not isinstance(bias, Mapping):
            refuse("logit_bias", bias, "expected a mapping", "Give {token id: value added to its logit}.")
        check("stop_token_ids", self.stop_token_ids)
        check("dry_breaker_token_ids", self.dry_breaker_token_ids)
        for field in ("thinking_end", "thinking_start"):
            if _is_integer(mark := getattr(self, field)):
                check(field, (mark,))
        check("logit_bias", tuple(bias or ()))
        if self.allowed_token_ids is not None:
            check("allowed_token_ids", self.allowed_token_ids)
        if not isinstance(words, tuple):
            refuse("bad_words_token_ids", words, "expected a list of lists of token ids", "Give a list.")
        for word in words:
            check("bad_words_token_ids", word)
            if not word:
                refuse("bad_words_token_ids", words, "contains an empty list", "Remove it.")
        for value in (bias or {}).values():
            if not _is_number(value) or not (value == -math.inf or abs(value) <= _MAX_BIAS):
                reason = f"must be in [{-_MAX_BIAS:g}, {_MAX_BIAS:g}], or −inf"
                refuse("logit_bias", value, reason, "Use −inf to forbid a token, allowed_token_ids to force some.")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            refuse("allowed_token_ids", [], "allows no token", "Give at least one token, or None for no limit.")


def _are_strings(value: object) -> bool:
    return value is _EMPTY or (isinstance(value, Sequence) and all(isinstance(item, str) for item in value))


def _is_integer(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # isinstance of an abstract class is slow


def _is_number(value: object) -> bool:
    return type(value) is float or isinstance(value, Real)


def _integer(value: Any) -> Any:
    """``value.__index__()``, or the value itself without one."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except MemoryError:
        raise
    except Exception:
        return value


def _float(value: Any) -> Any:
    """``value.__float__()``, or the value itself without one."""
    if not hasattr(type(value), "__float__"):
        return value
    try:
        return float(value)
    except MemoryError:
        raise
    except Exception:
        return value


def _flag(value: Any) -> Any:
    return bool(value) if isinstance(value, np.bool_) else value


def _each(convert: Callable[[Any], Any], values: Any) -> Any:
    """A tuple of the converted values, or the values themselves if they are no list, or one without an end."""
    if isinstance(values, Mapping | bytes | bytearray):
        return values
    try:
        found = tuple(map(convert, islice(values, MAX_ITEMS + 1)))
    except MemoryError:
        raise
    except Exception:
        return values
    return found if len(found) <= MAX_ITEMS else values


def _ids(values: Any) -> Any:
    return _each(_integer, values)


def _id_lists(values: Any) -> Any:
    return _each(_ids, values)


def _texts(values: Any) -> Any:
    return _each(_same, values)


def _same(value: Any) -> Any:
    return value


def _biases(values: Any) -> Any:
    return {_integer(token): _float(bias) for token, bias in values.items()} if isinstance(values, Mapping) else values


def _arguments(values: Any) -> Any:
    return dict(values) if isinstance(values, Mapping) else values


_INTEGERS = (  # and whether None is valid
    ("n", False),
    ("best_of", True),
    ("top_k", False),
    ("seed", True),
    ("max_tokens", True),
    ("min_tokens", False),
    ("dry_allowed_length", False),
    ("dry_range", False),
    ("logprobs", True),
    ("prompt_logprobs", True),
    ("thinking_budget", True),
    ("truncate_prompt_tokens", True),
)
_MAX_BIAS = 1e30  # biased logits stay finite in float32 under all penalties
_RANGES = (
    ("temperature", 0.0, 100.0, "Use 0 for greedy, around 0.7 for variety."),
    ("top_p", 0.0, 1.0, "Use 1.0 for no limit."),
    ("min_p", 0.0, 1.0, "Use 0.0 for no limit."),
    ("typical_p", 0.0, 1.0, "Use 1.0 for no limit."),
    ("top_n_sigma", -1.0, 1000.0, "Use 0.0 for no limit, around 1.0 for the most likely tokens."),
    ("xtc_probability", 0.0, 1.0, "Use 0.0 for never."),
    ("xtc_threshold", 0.0, 1.0, "Use 0.1; above 0.5 it has no effect."),
    ("presence_penalty", -2.0, 2.0, "Use 0.0 for none."),
    ("frequency_penalty", -2.0, 2.0, "Use 0.0 for none."),
    ("repetition_penalty", 0.01, 100.0, "Use 1.0 for none."),
    ("dry_multiplier", 0.0, 1000.0, "Use 0.0 for none, around 0.8 to penalize repetitions."),
    ("dry_base", 1.0, 1000.0, "Use 1.75."),
)
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids", "dry_breaker_token_ids")  # None: empty
_FIELDS = tuple(field.name for field in fields(SamplingParams))
_PLAIN = (int, float, bool, str)
_EMPTY: tuple[object, ...] = ()
_CONVERSIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    *((field, _integer) for field, _ in _INTEGERS),
    *((field, _float) for field, *_ in _RANGES),
    *((field, _flag) for field in _FLAGS),
    ("stop", _texts),
    ("stop_token_ids", _ids),
    ("bad_words", _texts),
    ("bad_words_token_ids", _id_lists),
    ("dry_sequence_breakers", _texts),
    ("dry_breaker_token_ids", _ids),
    ("allowed_token_ids", _ids),
    ("logit_bias", _biases),
    ("structured_outputs", structured_outputs),
    ("thinking_end", _integer),
    ("thinking_start", _integer),
    ("extra_args", _arguments),
)
