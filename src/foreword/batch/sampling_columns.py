"""Sampling parameters of the live requests: one array a parameter, by state row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.batch.sampling import SamplingParams

I32 = npt.NDArray[np.int32]


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


class SamplingColumns:
    """One array a parameter, [R], by state row. ``num_logprobs`` is −1 where none are wanted and V where all are.

    needs: int32 [R], the `Need` flags of each row. params: the request's own parameters object by row, for what no
    column holds; a row filled from columns has none. stamp: int64 [R], renewed by every change of a row.
    """

    __slots__ = (*COLUMNS, "_blocks", "core", "is_set", "params", "stamp", "version")

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    min_p: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    seed: npt.NDArray[np.int64]
    min_tokens: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    num_prompt_logprobs: npt.NDArray[np.int32]
    needs: npt.NDArray[np.int32]

    def __init__(self, max_num_reqs: int) -> None:
        # Columns of one type are rows of one array, so that resetting a request is one assignment a type.
        self._blocks: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
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
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if params.top_k < vocab_size else 0
        self.min_p[row] = params.min_p
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.seed[row] = params.seed if params.seed is not None else 0
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = _count(params.logprobs, vocab_size)
        self.num_prompt_logprobs[row] = _count(params.prompt_logprobs, vocab_size)
        self.params[row] = params
        self.needs[row] = needs_of(params, vocab_size)
        self.version += 1
        self.is_set[row] = True
        self.stamp[row] = self.version

    def set_columns(self, rows: I32, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """column[rows] = values for each named column."""
        for name, values in columns.items():
            getattr(self, name)[rows] = values
        self._renew(rows)

    def reset(self, rows: npt.NDArray[np.integer]) -> None:
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

    def _renew(self, rows: npt.NDArray[np.integer]) -> None:
        """Note a change of rows, and what they need by their columns."""
        self.version += 1
        if self.core is not None:
            self.core.renew_sampling(np.ascontiguousarray(rows, np.int32), self.version)
            return
        self.is_set[rows] = True
        self.stamp[rows] = self.version
        penalties = (
            (self.presence_penalty[rows] != 0)
            | (self.frequency_penalty[rows] != 0)
            | (self.repetition_penalty[rows] != 1)
        )
        random = self.temperature[rows] > 0
        needs = np.where(random, int(Need.RANDOM), int(Need.GREEDY))
        for flag, needed in (
            (Need.TOP_P, self.top_p[rows] < 1),
            (Need.TOP_K, self.top_k[rows] > 0),
            (Need.MIN_P, self.min_p[rows] > 0),
            (Need.PENALTIES, penalties),
            (Need.LOGPROBS, self.num_logprobs[rows] >= 0),
            (Need.PROMPT_LOGPROBS, self.num_prompt_logprobs[rows] >= 0),
            (Need.MIN_TOKENS, self.min_tokens[rows] > 0),
        ):
            needs |= needed * int(flag)
        self.needs[rows] = needs


def needs_of(params: SamplingParams, vocab_size: int) -> int:
    """The `Need` flags of a request."""
    p = params
    needed = (
        (Need.RANDOM, p.temperature > 0),
        (Need.GREEDY, not p.temperature > 0),
        (Need.TOP_P, p.top_p < 1),
        (Need.TOP_K, 0 < p.top_k < vocab_size),
        (Need.MIN_P, p.min_p > 0),
        (Need.PENALTIES, (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0.0, 0.0, 1.0)),
        (Need.LOGPROBS, p.logprobs is not None),
        (Need.PROMPT_LOGPROBS, p.prompt_logprobs is not None),
        (Need.MIN_TOKENS, p.min_tokens > 0),
        (Need.LOGIT_BIAS, bool(p.logit_bias)),
        (Need.BAD_WORDS, bool(p.bad_words_token_ids)),
        (Need.ALLOWED_TOKENS, p.allowed_token_ids is not None),
        (Need.STRUCTURED_OUTPUT, p.structured_outputs is not None),
    )
    return sum(int(flag) for flag, wanted in needed if wanted)


def _count(wanted: int | None, vocab_size: int) -> int:
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else min(wanted, vocab_size)
