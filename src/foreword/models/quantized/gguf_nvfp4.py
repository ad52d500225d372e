"""NVFP4 of GGUF files with factors: w[o, i] = nvfp4[o, i] · factor, one for the matrix, or for that of each expert.

The factors of NAME.weight are NAME.scale, those of its inputs, which are not quantised here, NAME.input_scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from foreword.arrays import F32, U8
from foreword.errors import ModelError
from foreword.models.files import FETCH_AGAIN, StoredRows
from foreword.models.quantized.matrix import ConvertedRows, encoded, in_chunks
from foreword.models.quants import Quant, dequantize
from foreword.models.weights import Tensor

_MOST = 1024
"""A factor up to this times the largest weight of NVFP4 fits into Q8_0."""


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """factors: those of parts with the same number of rows."""

    rows: StoredRows
    factors: F32
    shape: tuple[int, int]

    source, quant = "NVFP4 with factors", Quant.Q8_0

    def convert(self, start: int, stop: int) -> U8:
        size = self.shape[0] // len(self.factors)

        def rows(first: int, last: int) -> U8:
            values = dequantize(self.rows[first:last].read(), Quant.NVFP4)
            values *= self.factors[np.arange(first, last) // size, None]
            return encoded(values, self.quant)

        return in_chunks(self, start, stop, rows)


def with_factors(path: Path, tensors: Mapping[str, Tensor], own: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file without factors: those in NVFP4 that have some are multiplied, as Q8_0. Raise
    ModelError for factors that do not fit.

    own: the ends of the names of other factors, which the model multiplies with.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if tensor.quant is not Quant.NVFP4 or stem == name:
            continue
        found.pop(f"{stem}.input_scale", None)
        factor = None if f"{stem}.scale".endswith(own) else found.pop(f"{stem}.scale", None)
        if factor is None:
            continue
        where, count = f"{path}: tensor {stem}.scale: ", prod(factor.shape)
        if count != 1 and (len(tensor.shape) != 3 or count != tensor.shape[0]):
            raise ModelError(f"{where}shape {factor.shape} does not fit {name} {tensor.shape}. {FETCH_AGAIN}")
        factors = factor.dequantize().ravel()
        if not (good := (factors > 0) & (factors <= _MOST)).all():
            raise ModelError(f"{where}{factors[~good][0]} is not a number above 0, of at most {_MOST}. {FETCH_AGAIN}")
        assert not isinstance(tensor.stored, np.ndarray)
        rows = prod(tensor.shape[:-1])
        matrix = _Matrix(tensor.stored, factors, (rows, tensor.shape[-1]))
        found[name] = Tensor(ConvertedRows(matrix, 0, rows), Quant.Q8_0, tensor.shape)
    return found
