"""Log-probabilities of tokens, from the model's own logits (before any change or temperature)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword.arrays import F32, F64, I32, I64, Ints
from foreword.native import available, native


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability and its rank (1 is the most likely; equal tokens share the lowest rank number).

    token_bytes: what the token adds to the text; None without a tokenizer.
    """

    logprob: float
    rank: int
    token_bytes: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def decoded_token(self) -> str | None:
        """The text of the token, with U+FFFD for a part of a character; None without a tokenizer."""
        return None if self.token_bytes is None else self.token_bytes.decode("utf-8", "replace")


class TokenLogprobs(Mapping[int, Logprob]):
    """Token id → `Logprob`: the chosen token first, then the most likely ones. The objects are made when it is read.

    token_bytes: tells what a token adds to the text; None without a tokenizer.
    """

    __slots__ = ("_arrays", "_at", "_entries", "token_bytes")

    def __init__(self, arrays: LogprobArrays | None, at: int = 0, entries: dict[int, Logprob] | None = None) -> None:
        self._arrays, self._at, self._entries = arrays, at, entries
        self.token_bytes: Callable[[int], bytes] | None = None

    def _read(self) -> dict[int, Logprob]:
        if self._entries is None:
            assert self._arrays is not None
            self._entries, self._arrays = self._arrays.read(self._at, self.token_bytes), None
        return self._entries

    @property
    def chosen(self) -> Logprob:
        """Return the entry of the chosen token."""
        if self._entries is None and self._arrays is not None:
            return self._arrays.chosen(self._at)
        return next(iter(self._read().values()))

    def by_token(self) -> dict[int, float]:
        """Return token id → log-probability in the same order. No `Logprob` is created, and the result is
        not cached.
        """
        if self._arrays is None:
            return {token: entry.logprob for token, entry in self._read().items()}
        return self._arrays.by_token(self._at)

    def __getitem__(self, token: int) -> Logprob:
        return self._read()[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def __len__(self) -> int:
        if self._entries is None and self._arrays is not None:
            return self._arrays.count(self._at)
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce__(self) -> Any:
        return TokenLogprobs, (None, 0, self._read())


@dataclass(frozen=True, slots=True, eq=False)
class LogprobArrays:
    """Log-probabilities of n tokens: entry i is at [offsets[i], offsets[i + 1]) of the other arrays, the token first.

    offsets: int64 [n + 1]. ids: int32. logprobs: float64. ranks: int32.
    """

    offsets: I64
    ids: I32
    logprobs: F64
    ranks: I32

    @classmethod
    def for_counts(cls, counts: Ints) -> LogprobArrays:
        """Return arrays for n tokens, each with its own number of most likely tokens; −1 for no entry."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts + 1, out=offsets[1:])
        size = int(offsets[-1])
        return cls(offsets, np.empty(size, np.int32), np.empty(size, np.float64), np.empty(size, np.int32))

    def all(self) -> tuple[I64, I32, F64, I32]:
        """Return the arrays in their order."""
        return self.offsets, self.ids, self.logprobs, self.ranks

    def chosen(self, i: int) -> Logprob:
        """Return the chosen token of entry i."""
        at = self.offsets[i]
        return Logprob(float(self.logprobs[at]), int(self.ranks[at]))

    def count(self, i: int) -> int:
        """Return the number of tokens of entry i."""
        return len(set(self.ids[self.offsets[i] : self.offsets[i + 1]].tolist()))

    def by_token(self, i: int) -> dict[int, float]:
        """Return token id → log-probability of entry i, the chosen token first."""
        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return dict(zip(self.ids[span].tolist(), self.logprobs[span].tolist(), strict=True))

    def read(self, i: int, token_bytes: Callable[[int], bytes] | None = None) -> dict[int, Logprob]:
        """Return entry i, the chosen token first. token_bytes: returns the bytes that a token adds to the text."""
        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        found: dict[int, Logprob] = {}
        rows = zip(self.ids[span].tolist(), self.logprobs[span].tolist(), self.ranks[span].tolist(), strict=True)
        for token, logprob, rank in rows:
            found.setdefault(token, Logprob(logprob, rank, None if token_bytes is None else token_bytes(token)))
        return found


class StepLogprobs(Mapping[int, list[TokenLogprobs]]):
    """Batch index → one entry per sampled token, for the requests that want log-probabilities.

    arrays: an entry for each row of logits. wanting: int64 [n] batch indices; first: [n], their first rows of logits.
    tokens: [B, W], −1 where none was sampled.
    """

    __slots__ = ("_first", "arrays", "tokens")

    def __init__(self, arrays: LogprobArrays, wanting: I64, first: Ints, tokens: I32) -> None:
        self.arrays, self.tokens = arrays, tokens
        self._first = dict(zip(wanting.tolist(), first.tolist(), strict=True))

    def __getitem__(self, b: int) -> list[TokenLogprobs]:
        first = self._first[b]
        count = int((self.tokens[b] >= 0).sum())
        return [TokenLogprobs(self.arrays, i) for i in range(first, first + count)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def row_logprobs(logits: F32, token: int, count: int) -> tuple[I64, F64, I64]:
    """Return (ids, log-probabilities, ranks), [1 + count] each: a token, then the ``count`` most likely ones, of one
    row [V].

    logprob(t) = logits[t] − log Σ exp(logits). Of equal tokens the lower id comes first.
    """
    z = logits.astype(np.float64)
    top = z.max()
    ids = np.concatenate([[token], np.argsort(-z, kind="stable")[:count]])
    ranks = len(z) - np.searchsorted(np.sort(z), z[ids], side="right") + 1
    return ids, z[ids] - top - np.log(np.exp(z - top).sum()), ranks


def read_logprobs(logits: F32, tokens: I32, counts: Ints, threads: native.CpuModel | None = None) -> LogprobArrays:
    """Return, for each row of logits [n, V], those of tokens[i] and of the counts[i] most likely tokens.

    threads: the model whose idle threads compute too.
    """
    found = LogprobArrays.for_counts(counts)
    if available():
        native.token_logprobs(logits, tokens, *found.all(), threads)
        return found
    for i, (token, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
        span = slice(found.offsets[i], found.offsets[i + 1])
        found.ids[span], found.logprobs[span], found.ranks[span] = row_logprobs(logits[i], token, count)
    return found


def token_logprobs(logits: F32, token: int, count: int) -> TokenLogprobs:
    """Return the chosen token first, then the ``count`` most likely ones, from one row of logits [V]."""
    count = min(count, len(logits))
    return TokenLogprobs(read_logprobs(logits[None], np.array([token], np.int32), np.array([count])))
