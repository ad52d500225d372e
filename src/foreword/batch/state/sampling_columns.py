"""Sampling parameters of the live requests: one array per parameter, by state row.

`COLUMNS` and `FLAG_RULES` define the parameters' types, defaults and flags, for this module and for native code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I32, I64, AnyArray, Ints
from foreword.batch.values.sampling_params import SamplingParams
from foreword.batch.values.seeds import derived_seed, derived_seeds


class Need(IntFlag):
    """What the sampling of a row needs, so that a step can skip what none of its rows needs."""

    GREEDY = 1  # temperature 0
    RANDOM = 2
    TOP_P = 4
    TOP_K = 8
    MIN_P = 16
    PENALTIES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    MIN_TOKENS = 256
    LOGIT_BIAS = 512
    BAD_WORDS = 1024
    ALLOWED_TOKENS = 2048
    STRUCTURED_OUTPUT = 4096


RARE = Need.MIN_TOKENS | Need.LOGIT_BIAS | Need.BAD_WORDS | Need.ALLOWED_TOKENS | Need.STRUCTURED_OUTPUT

# column → (dtype, value of a row without sampling parameters). A row is greedy by default; a request is not.
COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "temperature": (np.float32, 0.0),
    "top_p": (np.float32, 1.0),
    "top_k": (np.int32, 0),
    "min_p": (np.float32, 0.0),
    "presence_penalty": (np.float32, 0.0),
    "frequency_penalty": (np.float32, 0.0),
    "repetition_penalty": (np.float32, 1.0),
    "seed": (np.int64, 0),
    "min_tokens": (np.int32, 0),
    "num_logprobs": (np.int32, -1),
    "num_prompt_logprobs": (np.int32, -1),
    "needs": (np.int32, int(Need.GREEDY)),
}
GIVEN = tuple(name for name in COLUMNS if name != "needs")  # needs follow from the others


class FlagRule(NamedTuple):
    """A row has ``flag`` if its value of ``column``, as stored, compares so with ``operand``."""

    flag: int
    column: str
    comparison: str  # a key of COMPARISONS
    operand: float


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "!=": operator.ne,
    "not >": lambda x, y: ~(x > y),  # true of NaN
}
FLAG_RULES = (
    FlagRule(int(Need.GREEDY), "temperature", "not >", 0),
    FlagRule(int(Need.RANDOM), "temperature", ">", 0),
    FlagRule(int(Need.TOP_P), "top_p", "<", 1),
    FlagRule(int(Need.TOP_K), "top_k", ">", 0),
    FlagRule(int(Need.MIN_P), "min_p", ">", 0),
    FlagRule(int(Need.PENALTIES), "presence_penalty", "!=", 0),
    FlagRule(int(Need.PENALTIES), "frequency_penalty", "!=", 0),
    FlagRule(int(Need.PENALTIES), "repetition_penalty", "!=", 1),
    FlagRule(int(Need.LOGPROBS), "num_logprobs", ">=", 0),
    FlagRule(int(Need.PROMPT_LOGPROBS), "num_prompt_logprobs", ">=", 0),
    FlagRule(int(Need.MIN_TOKENS), "min_tokens", ">", 0),
)
_COMPILED_RULES = tuple((rule.flag, rule.column, COMPARISONS[rule.comparison], rule.operand) for rule in FLAG_RULES)


class SamplingColumns:
    """One array per parameter, [R], by state row. ``num_logprobs`` is −1 where none are requested and V where all are.

    needs: int32 [R], the `Need` flags of each row. params: row → the request's parameters object, for what no column
    holds; a row filled from columns has none. stamp: int64 [R], renewed by every change of a row.
    version: grows with every change, so that what was made from the columns can be checked for being current.
    base_seed: what the seeds of requests without one are derived from.
    """

    __slots__ = (*COLUMNS, "_blocks", "base_seed", "core", "is_set", "params", "stamp", "version")

    temperature: F32
    top_p: F32
    top_k: I32
    min_p: F32
    presence_penalty: F32
    frequency_penalty: F32
    repetition_penalty: F32
    seed: I64
    min_tokens: I32
    num_logprobs: I32
    num_prompt_logprobs: I32
    needs: I32

    def __init__(self, max_num_reqs: int, base_seed: int = 0) -> None:
        # Columns of one type are rows of one array, so that resetting a request is one assignment per type.
        self._blocks: list[tuple[AnyArray, AnyArray]] = []
        for dtype in dict.fromkeys(dtype for dtype, _ in COLUMNS.values()):
            names = [name for name, column in COLUMNS.items() if column[0] is dtype]
            defaults = np.array([[COLUMNS[name][1]] for name in names], dtype)
            block = np.repeat(defaults, max_num_reqs, axis=1)
            self._blocks.append((block, defaults))
            for name, column in zip(names, block, strict=True):
                setattr(self, name, column)
        self.is_set = np.zeros(max_num_reqs, np.bool_)  # rows that may differ from the defaults
        self.stamp = np.zeros(max_num_reqs, np.int64)
        self.params: dict[int, SamplingParams] = {}
        self.core: Any = None  # the native core over these arrays, where it is built
        self.version = 0
        self.base_seed = base_seed

    def native_layout(self) -> dict[str, Any]:
        """The arrays, their defaults and the flag rules, as native code takes them."""
        return {
            "columns": {name: (getattr(self, name), default) for name, (_, default) in COLUMNS.items()},
            "flag_rules": [tuple(rule) for rule in FLAG_RULES],
            "stamp": self.stamp,
            "is_set": self.is_set,
        }

    def set(self, row: int, params: SamplingParams | None, vocab_size: int, admission: int = 0) -> None:
        """Write a request's parameters to its row; None writes the defaults (greedy, nothing else).

        admission: the number of the request's admission. Without a seed of its own it gets the one derived from
        ``base_seed`` and this number, so that requests without a seed draw independently.
        """
        if params is None:
            self.reset(np.array([row]))
            return
        values = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k < vocab_size else 0,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "seed": derived_seed(self.base_seed, admission) if params.seed is None else params.seed,
            "min_tokens": params.min_tokens,
            "num_logprobs": _count(params.logprobs, vocab_size),
            "num_prompt_logprobs": _count(params.prompt_logprobs, vocab_size),
        }
        for name, value in values.items():
            getattr(self, name)[row] = value
        self.params[row] = params
        self.needs[row] = self.flags_from_columns(row) | flags_from_params(params)
        self.version += 1
        self.is_set[row] = True
        self.stamp[row] = self.version

    def set_columns(self, rows: I32, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """column[rows] = values for each named column."""
        for name, values in columns.items():
            getattr(self, name)[rows] = values
        self._renew(rows)

    def set_derived_seeds(self, rows: Ints, first_admission: int) -> None:
        """The seeds of requests without one, admitted in this order from ``first_admission`` on."""
        self.seed[rows] = derived_seeds(self.base_seed, first_admission, len(rows))

    def reset(self, rows: Ints) -> None:
        """The defaults (greedy, nothing else) in these rows."""
        rows = rows[self.is_set[rows]]
        if not len(rows):
            return
        self.is_set[rows] = False
        self.stamp[rows] = self.version + 1
        for block, defaults in self._blocks:
            block[:, rows] = defaults
        self.were_reset(rows.tolist())

    def were_reset(self, rows: Iterable[int]) -> None:
        """Note that the columns of these rows have the defaults again, and stamps of the next version."""
        self.version += 1
        if self.params:
            for row in rows:
                self.params.pop(row, None)

    def exchange(self, a: int, b: int) -> None:
        """Swap the parameters objects of two rows, whose arrays the caller swaps."""
        held = self.params
        values = held.pop(a, None), held.pop(b, None)
        for row, value in zip((b, a), values, strict=True):
            if value is not None:
                held[row] = value
        # Rows set in one call share a stamp; after a move each gets its own.
        self.stamp[a], self.stamp[b] = self.version + 1, self.version + 2
        self.version += 2

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        return [self.is_set, *(getattr(self, name) for name in COLUMNS)]

    def _renew(self, rows: Ints) -> None:
        """Note a change of rows, and set their flags from the columns."""
        self.version += 1
        if self.core is not None:
            self.core.renew_sampling(np.ascontiguousarray(rows, np.int32), self.version)
            return
        self.is_set[rows] = True
        self.stamp[rows] = self.version
        self.needs[rows] = self.flags_from_columns(rows)

    def flags_from_columns(self, rows: Any) -> Any:
        """The flags of a row, or of rows, by `FLAG_RULES`."""
        needs: Any = 0
        for flag, name, compare, operand in _COMPILED_RULES:
            needs = needs | compare(getattr(self, name)[rows], operand) * flag
        return needs


def flags_from_params(params: SamplingParams) -> int:
    """The `Need` flags of parameters that no column holds."""
    rare = (
        (Need.LOGIT_BIAS, bool(params.logit_bias)),
        (Need.BAD_WORDS, len(params.bad_words_token_ids) > 0),
        (Need.ALLOWED_TOKENS, params.allowed_token_ids is not None),
        (Need.STRUCTURED_OUTPUT, params.structured_outputs is not None),
    )
    return sum(int(flag) for flag, wanted in rare if wanted)


def _count(wanted: int | None, vocab_size: int) -> int:
    """num_logprobs as stored: −1 for None, V for −1 (all)."""
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else min(wanted, vocab_size)
