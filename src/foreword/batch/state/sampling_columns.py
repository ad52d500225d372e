"""Sampling parameters of the live requests: one array a parameter, by state row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I32, I64, AnyArray, Ints
from foreword.batch.values.sampling_params import SamplingParams


class Need(IntFlag):
    """What sampling a row takes, so that a step can skip what none of its rows needs."""

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

# column → (dtype, value of a row without sampling parameters). Greedy is the default of a row, not of a request.
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

# (flag, column, whether a value of it needs that), for one value and for arrays
_TELLING: tuple[tuple[int, str, Callable[[Any], Any]], ...] = (
    (int(Need.GREEDY), "temperature", lambda x: x <= 0),
    (int(Need.RANDOM), "temperature", lambda x: x > 0),
    (int(Need.TOP_P), "top_p", lambda x: x < 1),
    (int(Need.TOP_K), "top_k", lambda x: x > 0),
    (int(Need.MIN_P), "min_p", lambda x: x > 0),
    (int(Need.PENALTIES), "presence_penalty", lambda x: x != 0),
    (int(Need.PENALTIES), "frequency_penalty", lambda x: x != 0),
    (int(Need.PENALTIES), "repetition_penalty", lambda x: x != 1),
    (int(Need.LOGPROBS), "num_logprobs", lambda x: x >= 0),
    (int(Need.PROMPT_LOGPROBS), "num_prompt_logprobs", lambda x: x >= 0),
    (int(Need.MIN_TOKENS), "min_tokens", lambda x: x > 0),
)


class SamplingColumns:
    """One array a parameter, [R], by state row. ``num_logprobs`` is −1 where none are wanted and V where all are.

    needs: int32 [R], the `Need` flags of each row. params: the request's own parameters object by row, for what no
    column holds; a row filled from columns has none. stamp: int64 [R], renewed by every change of a row.
    """

    __slots__ = (*COLUMNS, "_blocks", "core", "is_set", "params", "stamp", "version")

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

    def __init__(self, max_num_reqs: int) -> None:
        # Columns of one type are rows of one array, so that resetting a request is one assignment a type.
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
        self.version = 0  # grows with every change: what was made from the columns can tell whether it is still true

    def set(self, row: int, params: SamplingParams | None, vocab_size: int) -> None:
        """Write a request's parameters to its row; None writes the defaults (greedy, nothing else)."""
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
            "seed": params.seed if params.seed is not None else 0,
            "min_tokens": params.min_tokens,
            "num_logprobs": _count(params.logprobs, vocab_size),
            "num_prompt_logprobs": _count(params.prompt_logprobs, vocab_size),
        }
        for name, value in values.items():
            getattr(self, name)[row] = value
        self.params[row] = params
        self.needs[row] = self._told(row) | needs_of(params)
        self.version += 1
        self.is_set[row] = True
        self.stamp[row] = self.version

    def set_columns(self, rows: I32, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """column[rows] = values for each named column."""
        for name, values in columns.items():
            getattr(self, name)[rows] = values
        self._renew(rows)

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
        """Swap what two rows have that is in no array."""
        held = self.params
        values = held.pop(a, None), held.pop(b, None)
        for row, value in zip((b, a), values, strict=True):
            if value is not None:
                held[row] = value
        # Rows set in one call share a stamp: after a move each gets its own.
        self.stamp[a], self.stamp[b] = self.version + 1, self.version + 2
        self.version += 2

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        return [self.is_set, *(getattr(self, name) for name in COLUMNS)]

    def _renew(self, rows: Ints) -> None:
        """Note a change of rows, and what they need by their columns."""
        self.version += 1
        if self.core is not None:
            self.core.renew_sampling(np.ascontiguousarray(rows, np.int32), self.version)
            return
        self.is_set[rows] = True
        self.stamp[rows] = self.version
        self.needs[rows] = self._told(rows)

    def _told(self, rows: Any) -> Any:
        """The flags that the columns of a row, or of rows, tell: by the values there, rounded as they are."""
        needs: Any = 0
        for flag, name, tells in _TELLING:
            needs = needs | tells(getattr(self, name)[rows]) * flag
        return needs


def needs_of(params: SamplingParams) -> int:
    """The `Need` flags of what no column holds."""
    rare = (
        (Need.LOGIT_BIAS, bool(params.logit_bias)),
        (Need.BAD_WORDS, len(params.bad_words_token_ids) > 0),
        (Need.ALLOWED_TOKENS, params.allowed_token_ids is not None),
        (Need.STRUCTURED_OUTPUT, params.structured_outputs is not None),
    )
    return sum(int(flag) for flag, wanted in rare if wanted)


def _count(wanted: int | None, vocab_size: int) -> int:
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else min(wanted, vocab_size)
