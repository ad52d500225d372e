"""Numbers at equal distances: w[o, i] = s[o, g] · q[o, i] + b[o, g] for column i in group g of adjacent columns, with
unsigned q.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.quantized.matrix import encoded, in_chunks, of_8_bits
from foreword.models.quants import Quant, pack_q4, pack_q5_1

Factors = Callable[[int, int], tuple[F32, F32]]


@dataclass(frozen=True, eq=False)
class AffineMatrix(ABC):
    """group_size: columns of a group, of which each row has whole ones."""

    bits: int
    group_size: int
    shape: tuple[int, int]

    @property
    @abstractmethod
    def source(self) -> str: ...

    @cached_property
    def quant(self) -> Quant:
        """Return Q4_1 or Q5_1 for at most 5 bits with s and b that float16 can hold and whole groups, else Q8_0."""
        if self.bits > 5 or self.group_size % 32:
            return of_8_bits(self.shape)
        scale, bias = self.factors()(0, self.shape[0])
        change = _rounding(scale) * ((1 << self.bits) - 1) + _rounding(bias)
        if (change > np.abs(scale) / 64 + 4e-6).any():
            return Quant.Q8_0
        return Quant.Q4_1 if self.bits < 5 else Quant.Q5_1

    @abstractmethod
    def factors(self) -> Factors:
        """Return what gives s and b of rows [start, stop), float32 [rows, groups]."""

    @abstractmethod
    def integers(self, start: int, stop: int) -> U8:
        """Return q of rows [start, stop), uint8 [rows, in]."""

    def convert(self, start: int, stop: int) -> U8:
        factors, pack = self.factors(), {Quant.Q4_1: pack_q4, Quant.Q5_1: pack_q5_1}.get(self.quant)

        def rows(first: int, last: int) -> U8:
            q = self.integers(first, last)
            scale, bias = factors(first, last)
            if pack is not None:
                times = self.group_size // 32
                return pack(q.reshape(-1, 32), scale.repeat(times, axis=1).ravel(), bias.repeat(times, axis=1).ravel())
            values = q.reshape(*scale.shape, self.group_size) * scale[..., None] + bias[..., None]
            return encoded(values.reshape(-1, self.shape[1]), self.quant)

        return in_chunks(self, start, stop, rows)


def _rounding(values: F32) -> F32:
    """Return how much values change as float16."""
    change: F32 = np.abs(values.astype(np.float16).astype(np.float32) - values)
    return change
