"""The limits of the steps that may replay a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreword.arrays import Ints
from foreword.errors import ConfigError
from foreword.integers import is_int32


class BrokenPromise(NamedTuple):
    """The first limit that a step exceeds. request: the request of the batch, None for a sum over all requests."""

    tensor: str
    request: int | None
    expected: str
    got: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPromise:
    """The lengths for which a graph was captured. A step of B requests and T tokens may replay it if

        B ≤ num_reqs,  T ≤ num_tokens,  num_scheduled_tokens[b] ≤ max_query_len,  seq_lens[b] ≤ max_seq_len,
        is_uniform: num_scheduled_tokens[b] = max_query_len

    for each b < B. num_tokens, num_reqs: the sizes that the step is padded to. max_query_len, max_seq_len: the lengths
    for which launches and workspaces were sized, which may be larger than those of the captured step. is_uniform:
    kernels divide tokens
    among requests by max_query_len.

    Raise ConfigError for limits that no step can keep: num_tokens must be in num_reqs … num_reqs · max_query_len, and
    equal to the latter if is_uniform; max_seq_len ≥ max_query_len.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    is_uniform: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_reqs", "max_query_len", "max_seq_len"):
            if not is_int32(value := getattr(self, name), 1):
                raise ConfigError(f"GraphPromise({name}={value!r}): must be an integer of at least 1")
        most = self.num_reqs * self.max_query_len
        if not (most if self.is_uniform else self.num_reqs) <= self.num_tokens <= most:
            raise ConfigError(
                f"GraphPromise(num_tokens={self.num_tokens}): {self.num_reqs} requests of "
                + (f"{self.max_query_len} tokens have {most}" if self.is_uniform else
                   f"1 … {self.max_query_len} tokens have {self.num_reqs} … {most}")
            )  # fmt: skip
        if self.max_seq_len < self.max_query_len:
            raise ConfigError(
                f"GraphPromise(max_seq_len={self.max_seq_len}): must be at least max_query_len={self.max_query_len}"
            )

    def broken_by(self, num_scheduled: Ints, seq_lens: Ints) -> BrokenPromise | None:
        """Return the first limit that a step with these numbers of query tokens and keys, [B] each, exceeds; None if it
        may replay the graph. Planners call it to choose a graph before the step is prepared. It costs O(B).
        """
        B, T = len(num_scheduled), int(num_scheduled.sum())
        if self.num_reqs < B:
            return BrokenPromise("num_reqs", None, f"at most {self.num_reqs}", B)
        if self.num_tokens < T:
            return BrokenPromise("num_tokens", None, f"at most {self.num_tokens}", T)
        for tensor, values, most in (
            ("num_scheduled_tokens", num_scheduled, self.max_query_len),
            ("seq_lens", seq_lens, self.max_seq_len),
        ):
            is_exact = self.is_uniform and values is num_scheduled
            wrong = values != most if is_exact else values > most
            if wrong.any():
                b = int(np.argmax(wrong))
                return BrokenPromise(tensor, b, f"{most}" if is_exact else f"at most {most}", int(values[b]))
        return None
