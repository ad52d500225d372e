"""Padded sizes of a step: the captured graph that a step runs in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from foreword.errors import ConfigError, PlanError
from foreword.integers import is_int32


class PaddingBuckets:
    """Token counts for which graphs are captured, and the smallest one that holds a step.

    A graph has fixed (tokens, reqs). Of a bucket of s tokens:
        any step                                 (s, min(s, max_num_reqs))
        decodes with a query length of q each    (r · q, r) with r = min(ceil(s / q), max_num_reqs); left out where
                                                 r · q exceeds the largest bucket
    """

    __slots__ = ("max_num_reqs", "sizes")

    def __init__(self, sizes: Iterable[int], *, max_num_reqs: int | None = None) -> None:
        """Take the token counts ``sizes``, in any order, and the number of requests that the buffers hold (None: one
        per token).

        Raise ConfigError for no sizes, and for a size or limit below 1.
        """
        listed = list(sizes)
        for size in listed:
            if not is_int32(size, 1):
                raise ConfigError(f"PaddingBuckets: size {size!r}: must be an integer of at least 1")
        if not listed:
            raise ConfigError("PaddingBuckets(sizes=[]): needs at least one size")
        if max_num_reqs is not None and not is_int32(max_num_reqs, 1):
            raise ConfigError(f"PaddingBuckets(max_num_reqs={max_num_reqs!r}): must be at least 1, or None")
        self.sizes = tuple(sorted({int(size) for size in listed}))
        self.max_num_reqs = self.sizes[-1] if max_num_reqs is None else int(max_num_reqs)

    @classmethod
    def up_to(cls, largest: int, *, step: int = 8, max_num_reqs: int | None = None) -> PaddingBuckets:
        """Return buckets of the usual sizes: 1, 2, 4, … below ``step``, the multiples of ``step``, and ``largest``."""
        for name, value in (("largest", largest), ("step", step)):
            if not is_int32(value, 1):
                raise ConfigError(f"PaddingBuckets.up_to({name}={value!r}): must be an integer of at least 1")
        powers = (1 << i for i in range((step - 1).bit_length()))
        sizes = (*powers, *range(step, largest, step), largest)
        return cls((size for size in sizes if size <= largest), max_num_reqs=max_num_reqs)

    def pad_for(self, num_tokens: int, num_reqs: int, uniform_decode_len: int | None = None) -> tuple[int, int] | None:
        """Return (tokens, reqs) of the smallest graph that holds the step, for ``prepare_inputs(pad_to=…)``.

        Return None if no graph is large enough. uniform_decode_len: the query length that all requests have, to choose
        a graph of such decodes; None: a graph for any step.
        Raise PlanError unless num_reqs ≤ num_tokens, and num_tokens = num_reqs · uniform_decode_len where it is given.
        """
        q = uniform_decode_len
        if q is None:
            if not 0 <= num_reqs <= num_tokens:
                raise PlanError("a step has at least one token per request", tensor="num_reqs",
                                expected=f"0 … {num_tokens}", got=num_reqs)  # fmt: skip
            at = bisect_left(self.sizes, num_tokens)
            if at == len(self.sizes) or num_reqs > self.max_num_reqs:
                return None
            return self.sizes[at], min(self.sizes[at], self.max_num_reqs)
        if q < 1 or num_reqs < 0 or num_tokens != num_reqs * q:
            raise PlanError("uniform decodes have num_reqs · uniform_decode_len tokens", tensor="num_tokens",
                            expected=f"{num_reqs} · {q}", got=num_tokens)  # fmt: skip
        at = bisect_right(self.sizes, (num_reqs - 1) * q)  # the first s with ceil(s / q) ≥ num_reqs
        return None if at == len(self.sizes) or num_reqs > self.max_num_reqs else self._uniform(self.sizes[at], q)

    def graphs(self, uniform_decode_len: int | None = None) -> list[tuple[int, int]]:
        """Return every (tokens, reqs) that `pad_for` may return, ascending: the graphs to capture."""
        if uniform_decode_len is None:
            return [(size, min(size, self.max_num_reqs)) for size in self.sizes]
        found = (self._uniform(size, uniform_decode_len) for size in self.sizes)
        return sorted({graph for graph in found if graph is not None})

    def _uniform(self, size: int, query_len: int) -> tuple[int, int] | None:
        reqs = min(-(-size // query_len), self.max_num_reqs)
        return (reqs * query_len, reqs) if reqs * query_len <= self.sizes[-1] else None

    def __repr__(self) -> str:
        return f"PaddingBuckets({list(self.sizes)}, max_num_reqs={self.max_num_reqs})"
