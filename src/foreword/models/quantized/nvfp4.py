"""NVFP4: w[o, i] = e2m1[o, i] · scale[o, i // 16] · factor, with scales in e4m3 and one factor for the matrix.

A byte has the bits of two columns, the first in the low nibble. modelopt stores the factor, compressed-tensors its
inverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.codebooks import E2M1
from foreword.models.config import Config
from foreword.models.quantized.fp8 import E4M3, fp8_matrix
from foreword.models.quantized.matrix import SAME_MODEL, Found, checked, encoded, in_chunks, of_8_bits, one_of, part
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry

_ALGORITHMS = ("fp8", "nvfp4")


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Matrix:
    """factor: one for all rows, or one for each. shape: of the matrix, of which ``weight`` has two columns in a byte,
    in any dtype.
    """

    weight: Entry
    scale: Entry
    factor: F32
    shape: tuple[int, int]

    source = "NVFP4"

    @property
    def quant(self) -> Quant:
        return of_8_bits(self.shape)

    def convert(self, start: int, stop: int) -> U8:
        factors = np.broadcast_to(self.factor, self.shape[0]).reshape(-1, 1)

        def rows(first: int, last: int) -> U8:
            pairs = self.weight.rows[first:last].read()
            scales = checked(self.scale, E4M3.take(self.scale.rows[first:last].read()) * factors[first:last])
            numbers = E2M1.take(np.stack([pairs & 15, pairs >> 4], axis=-1)).reshape(-1, 16)
            return encoded((numbers * (scales.reshape(-1, 1) * np.float32(0.5))).reshape(-1, self.shape[1]), self.quant)

        return in_chunks(self, start, stop, rows)


def nvfp4_matrix(name: str, weight: Entry, scale: Entry, whole: Entry, *, is_inverse: bool) -> Found:
    """Return the matrix of a tensor in NVFP4. Raise ModelError if its tensors do not fit each other."""
    if len(weight.shape) != 2 or weight.shape[1] % 8 or scale.shape != (weight.shape[0], weight.shape[1] // 8):
        raise scale.error(f"shape {scale.shape} does not fit pairs of columns {weight.shape} in 16s", SAME_MODEL)
    factor = factors_of(whole, 1)
    factor = np.reciprocal(factor) if is_inverse else factor
    matrix = Nvfp4Matrix(weight, scale, factor, (weight.shape[0], 2 * weight.shape[1]))
    return Found(name, matrix, (weight, scale, whole))


def factors_of(entry: Entry, count: int) -> F32:
    """Return the numbers that multiply the scales of ``count`` matrices. Raise ModelError unless all are above 0."""
    factors = entry.tensor().dequantize().ravel()
    if factors.size != count or not ((factors > 1e-30) & (factors < 1e30)).all():
        raise entry.error(f"{factors[:4]} is not {'one number' if count == 1 else f'{count} numbers'} above 0")
    return factors


def modelopt_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by modelopt. Raise ModelError as `nvfp4_matrix` and `fp8_matrix`."""
    algorithm = one_of(settings, "quant_algo", "", _ALGORITHMS)
    dtype = {"fp8": "F8_E4M3", "nvfp4": "U8"}[algorithm]
    for name, weight in entries.items():
        if weight.dtype != dtype or not name.endswith("weight"):
            continue
        if algorithm == "fp8":
            yield fp8_matrix(entries, name, weight, None)
        else:
            scale = part(entries, weight, f"{name}_scale", "F8_E4M3")
            whole = part(entries, weight, f"{name}_scale_2", "F32")
            yield nvfp4_matrix(name, weight, scale, whole, is_inverse=False)
