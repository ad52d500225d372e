"""Sampling parameters of a request: the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from foreword.batch.values.parameters import Column, Need, Parameter
from foreword.batch.values.structured_outputs import StructuredOutputs
from foreword.declared import declarations, is_integer, is_number
from foreword.declared import declared as parameter
from foreword.errors import RequestError, known_keywords
from foreword.integers import INT32_MAX

F32, I32, I64 = np.float32, np.int32, np.int64


@known_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The rules by which the tokens of a request are chosen, and by which its output ends.
    `foreword.sampling.reference` defines the order in which they apply.

    Each field is a row of the table `PARAMETERS`: its type, default, meaning, limits, and the array that holds it.
    A value of another type or out of range raises `RequestError` where the parameters are made.
    """

    # A row: default and meaning, then limits, column, and the advice in the error for another value.
    # fmt: off
    max_tokens: int | None = parameter(
        16, "End the output after this many tokens; without a limit it ends at the model's maximum length.",
        least=1, fix="Use 1 or more, or None for no limit.",
    )
    temperature: float = parameter(
        1.0, "Divide the logits by this value: 0 always chooses the most likely token, around 0.7 gives variety.",
        least=0.0, most=100.0, column=Column(F32, Need.RANDOM, ">", 0.0),
        fix="Use 0 for greedy, around 0.7 for variety.",
    )
    top_p: float = parameter(
        1.0, "Sample from the smallest set of tokens whose total probability reaches this value.",
        above=0.0, most=1.0, column=Column(F32, Need.TOP_P, "<", 1.0), fix="Use 1.0 for no limit.",
    )
    top_k: int = parameter(
        0, "Sample from this many of the most likely tokens; 0 or -1 means all.",
        least=-1, column=Column(I32, Need.TOP_K, ">", 0), fix="Use 0 for no limit.",
    )
    min_p: float = parameter(
        0.0, "Sample from the tokens with at least this fraction of the largest probability.",
        least=0.0, most=1.0, column=Column(F32, Need.MIN_P, ">", 0.0), fix="Use 0.0 for no limit.",
    )
    presence_penalty: float = parameter(
        0.0, "Subtract this from the logit of every token that the output contains.",
        least=-2.0, most=2.0, column=Column(F32, Need.PENALTIES, "!=", 0.0), fix="Use 0.0 for none.",
    )
    frequency_penalty: float = parameter(
        0.0, "Subtract this from the logit of a token for each of its occurrences in the output.",
        least=-2.0, most=2.0, column=Column(F32, Need.PENALTIES, "!=", 0.0), fix="Use 0.0 for none.",
    )
    repetition_penalty: float = parameter(
        1.0, "Divide positive and multiply negative logits of tokens in the prompt or the output; values above 1 "
        "discourage repetition.",
        least=0.01, most=100.0, column=Column(F32, Need.PENALTIES, "!=", 1.0), fix="Use 1.0 for none.",
    )
    typical_p: float = parameter(
        1.0, "Sample from the smallest set of the most typical tokens whose total probability reaches this value; "
        "typical is a log-probability near the expected one.",
        above=0.0, most=1.0, column=Column(F32, Need.TYPICAL_P, "<", 1.0), fix="Use 1.0 for no limit.",
    )
    top_n_sigma: float = parameter(
        0.0, "Sample from the tokens whose logit is at most this many standard deviations below the largest; 0 or "
        "less means all.", least=-1.0, most=1000.0, column=Column(F32, Need.TOP_N_SIGMA, ">", 0.0),
        fix="Use 0.0 for no limit, around 1.0 for the most likely tokens.",
    )
    xtc_probability: float = parameter(
        0.0, "Exclude the top choices (XTC) with this probability: of the tokens that reach xtc_threshold, keep the "
        "least likely.", least=0.0, most=1.0, column=Column(F32, Need.XTC, ">", 0.0), fix="Use 0.0 for never.",
    )
    xtc_threshold: float = parameter(
        0.1, "XTC drops only tokens with at least this probability.",
        least=0.0, most=1.0, column=Column(F32, Need.XTC, None, 0.1), fix="Use 0.1; above 0.5 it has no effect.",
    )
    dry_multiplier: float = parameter(
        0.0, "Penalize tokens that would extend a repeated sequence (DRY): subtract this, times dry_base for each "
        "token of the sequence beyond dry_allowed_length; around 0.8 is common, 0 turns it off.",
        least=0.0, most=1000.0, column=Column(F32, Need.DRY, ">", 0.0),
        fix="Use 0.0 for none, around 0.8 to penalize repetitions.",
    )
    dry_base: float = parameter(
        1.75, "Multiply the DRY penalty by this for each further token of the repeated sequence.",
        least=1.0, most=1000.0, column=Column(F32, Need.DRY, None, 1.75), fix="Use 1.75.",
    )
    dry_allowed_length: int = parameter(
        2, "DRY penalizes repeated sequences of at least this many tokens.",
        least=1, most=INT32_MAX, column=Column(I32, Need.DRY, None, 2),
        fix="Use 2 for repetitions of two tokens and more.",
    )
    dry_range: int = parameter(
        -1, "DRY searches this many of the latest tokens for repetitions; -1 means all.",
        least=-1, most=INT32_MAX, column=Column(I32, Need.DRY, None, -1),
        fix="Use -1 for the whole context, 0 for none.",
    )
    dry_sequence_breakers: Sequence[str] | None = parameter(
        None, "For DRY, no repeated sequence extends over the last token of one of these strings; by default "
        "newline, colon, quote and asterisk, where there is a tokenizer.",
    )
    dry_breaker_token_ids: Sequence[int] = parameter((), "For DRY, no repeated sequence extends over these tokens.")
    seed: int | None = parameter(
        None, "Requests with equal seeds and prompts get equal outputs, whatever else is in the batch; by default "
        "each request has its own seed.", least=-(2**63), most=2**63 - 1, column=Column(I64, Need.RANDOM, None, 0),
        fix="Give an integer of 64 bits, or None.",
    )
    min_tokens: int = parameter(
        0, "Allow no end token and no stop string before the output has this many tokens.",
        least=0, most=INT32_MAX, column=Column(I32, Need.MIN_TOKENS, ">", 0), fix="Use 0 for none.",
    )
    stop: str | Sequence[str] = parameter((), "End the output before this text.")
    stop_token_ids: Sequence[int] = parameter((), "End the output at this token.")
    ignore_eos: bool = parameter(False, "Continue past the model's end tokens.")
    include_stop_str_in_output: bool = parameter(False, "Include the stop that ended the output in its text.")
    skip_special_tokens: bool = parameter(True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = parameter(
        True, "Write the spaces that the vocabulary has before added tokens.",
    )
    detokenize: bool = parameter(True, "Make text of the output's tokens.")
    truncate_prompt_tokens: int | None = parameter(
        None, "Keep only this many, 1 or more, of the last tokens of the prompt; -1 keeps as many as leave room for "
        "max_tokens.", least=-1, fix="Use None for the whole prompt, -1 for all that leaves room for the output.",
    )
    logprobs: int | None = parameter(
        None, "Report the log-probability of each output token and of this many of the most likely tokens; -1 means "
        "all.",
        least=-1, column=Column(I32, Need.LOGPROBS, ">", -1, name="num_logprobs"), fix="Use None for none, -1 for all.",
    )
    prompt_logprobs: int | None = parameter(
        None, "Report the log-probability of each prompt token and of this many of the most likely tokens; -1 means "
        "all.", least=-1, column=Column(I32, Need.PROMPT_LOGPROBS, ">", -1, name="num_prompt_logprobs"),
        fix="Use None for none, -1 for all.",
    )
    bad_words: Sequence[str] = parameter((), "Never complete this text in the output.")
    bad_words_token_ids: Sequence[Sequence[int]] = parameter(
        (), "Never complete this sequence of tokens in the output.", need=Need.BAD_WORDS,
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None, "Choose only from these tokens.", need=Need.ALLOWED_TOKENS,
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None, "Add this value to the logit of the token with this id.", need=Need.LOGIT_BIAS,
    )
    forced_tokens: Sequence[int] = parameter(
        (), "Begin the output with these tokens, whatever their probabilities; logprobs reports the model's own.",
    )
    structured_outputs: object | None = parameter(
        None, 'Constrain the output: {"json": schema}, {"regex": text}, {"choice": texts} or {"grammar": text}.',
        need=Need.STRUCTURED_OUTPUT, convert=StructuredOutputs.of,
    )
    thinking_end: str | int | None = parameter(
        None, "The text or token that ends a first part of the output, the thinking; structured outputs begin after "
        "it.", fix='Give one, such as "</think>".',
    )
    thinking_start: str | int | None = parameter(
        None, "The text or token that begins the thinking: an output that begins otherwise has none; by default "
        "every output begins inside it.", fix='Give one, such as "<think>".',
    )
    thinking_budget: int | None = parameter(
        None, "Force thinking_end after this many tokens of thinking.",
        least=0, most=INT32_MAX, fix="Use None for no limit.",
    )
    n: int = parameter(1, "Generate this many outputs for the prompt.", least=1, fix="Use 1 or more.")
    best_of: int | None = parameter(
        None, "Generate this many candidates and return the n with the largest mean log-probability; by default, n.",
        least=1, fix="Use n or more.",
    )
    extra_args: Mapping[str, object] | None = parameter(
        None, "Pass these arguments to custom logits processors, by name.", fix="Give a dictionary with string keys.",
    )
    # fmt: on

    def __post_init__(self) -> None:
        """Copy the given values into new tuples, dictionaries and plain numbers, and check them.

        Raise `RequestError` for the first value of another type, out of range, or that contradicts another.
        """
        for row, value in zip(PARAMETERS, _values_of(self), strict=True):
            if value is not row.default:
                self._take(row, value)
        n, best_of, most = self.n, self.best_of, self.max_tokens
        if best_of is not None and best_of < n:
            raise self._refusal("best_of", f"must be at least n = {n}", "Raise best_of or lower n.")
        if most is not None and self.min_tokens > most:
            raise self._refusal("min_tokens", f"is above max_tokens = {most}", "Lower it or raise max_tokens.")
        if self.forced_tokens and self.needs_grammar:
            reason = "structured outputs or a thinking part decide which tokens may follow"
            raise self._refusal("forced_tokens", reason, "Leave out one of them.")
        if self.truncate_prompt_tokens == 0:
            fix = "Use None for the whole prompt."
            raise self._refusal("truncate_prompt_tokens", "must be at least 1, or -1", fix)

    def _take(self, row: Parameter, given: Any) -> None:
        """Replace a given value by its converted one, and check it."""
        value = given
        if type(given) not in _PLAIN or row.convert is not None:
            if given is not None:
                value = (row.convert or row.kind.convert)(given)
            elif row.default is _EMPTY:
                value = _EMPTY
            object.__setattr__(self, row.name, value)
        if (reason := row.refusal(value)) is not None:
            raise RequestError(None, row.name, value, reason, row.fix or row.kind.fix)
        if row.type in _OF_TOKENS:
            _check_token_ids(row, value, None, None)

    def _refusal(self, name: str, reason: str, fix: str) -> RequestError:
        return RequestError(None, name, getattr(self, name), reason, fix)

    def with_values(self, **values: Any) -> SamplingParams:
        """Return a copy with other values of some fields. The values must be checked already."""
        other = object.__new__(SamplingParams)
        for row in PARAMETERS:
            object.__setattr__(other, row.name, values[row.name] if row.name in values else getattr(self, row.name))
        return other

    @property
    def num_completions(self) -> int:
        """Return the number of completions of a prompt that are computed: best_of, or n."""
        return self.best_of or self.n

    @property
    def needs_grammar(self) -> bool:
        """Return whether the output needs a grammar: for its structure, for a thinking part before it, or for both."""
        return self.structured_outputs is not None or self.thinking_end is not None

    @property
    def has_mappings(self) -> bool:
        """Return whether a field holds a mapping, which is the only kind of value that can change later."""
        return self.logit_bias is not None or self.extra_args is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, request_id: str | None, vocab_size: int) -> None:
        """Raise `RequestError` for the first token id outside of a vocabulary, for a mapping that was changed, and for
        thinking without an end, which a conversation may have added.
        """
        for row in _NOT_FINAL:
            value = getattr(self, row.name)
            if value is row.default:
                continue
            if row.type in _OF_TOKENS:
                _check_token_ids(row, value, request_id, vocab_size)
            elif (reason := row.refusal(value)) is not None:
                raise RequestError(request_id, row.name, value, reason, row.fix or row.kind.fix)
        for name in ("thinking_start", "thinking_budget") if self.thinking_end is None else ():
            if (value := getattr(self, name)) is not None:
                reason = "needs thinking_end, the text that ends the thinking"
                raise RequestError(request_id, name, value, reason, "Give both.")


def _check_token_ids(row: Parameter, value: Any, request_id: str | None, vocab_size: int | None) -> None:
    """Raise `RequestError` if an id in the value of a parameter is outside of the vocabulary. vocab_size: None: any
    size.
    """

    def refuse(value: object, reason: str, fix: str) -> NoReturn:
        raise RequestError(request_id, row.name, value, reason, fix)

    most = math.inf if vocab_size is None else vocab_size - 1

    def check(ids: object) -> None:
        if not isinstance(ids, tuple):
            refuse(ids, "expected a list of token ids", "Give a list.")
        if len(ids) > most + 1:
            refuse(value, f"has {len(ids)} token ids, and the vocabulary {vocab_size}", "Give each once.")
        for token in ids:
            if not is_integer(token) or not 0 <= token <= most:
                limits = ", 0 or more" if vocab_size is None else f" in [0, {vocab_size})"
                refuse(token, f"expected a token id{limits}", "Remove it.")

    if value is None and row.optional:
        return
    match row.type:
        case "Sequence[int]":
            check(value)
            if value == () and row.optional:
                refuse([], "allows no token", "Give at least one token, or None for no limit.")
        case "str | int" if is_integer(value):
            check((value,))
        case "Sequence[Sequence[int]]":
            if not isinstance(value, tuple):
                refuse(value, "expected a list of lists of token ids", "Give a list.")
            for word in value:
                check(word)
                if not word:
                    refuse(value, "contains an empty list", "Remove it.")
        case "Mapping[int, float]":
            if not isinstance(value, Mapping):
                refuse(value, "expected a mapping", "Give {token id: value added to its logit}.")
            check(tuple(value))
            for bias in value.values():
                if not is_number(bias) or not (bias == -math.inf or abs(bias) <= _MAX_BIAS):
                    reason = f"must be in [{-_MAX_BIAS:g}, {_MAX_BIAS:g}], or -inf"
                    refuse(bias, reason, "Use -inf to forbid a token, allowed_token_ids to force some.")


def _named(row: Parameter) -> Parameter:
    """Return the row. If its column has no name, the column gets the name of the parameter."""
    return replace(row, column=row.column and row.column._replace(name=row.column.name or row.name))


PARAMETERS = tuple(map(_named, declarations(SamplingParams, Parameter).values()))
"""The table: a row per field of `SamplingParams`."""

_PLAIN = (int, float, bool, str)
_EMPTY: tuple[object, ...] = ()
_MAX_BIAS = 1e30  # biased logits stay finite in float32 under all penalties
_OF_TOKENS = ("Sequence[int]", "str | int", "Sequence[Sequence[int]]", "Mapping[int, float]")
"""Types of parameters that hold token ids."""

_values_of = attrgetter(*(row.name for row in PARAMETERS))
_NOT_FINAL = tuple(row for row in PARAMETERS if row.type in (*_OF_TOKENS, "Mapping[str, object]"))
"""The parameters whose values depend on a vocabulary, or may have changed since they were checked."""
