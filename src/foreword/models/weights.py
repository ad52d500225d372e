"""Weights as stored in a file: raw bytes with a number format and a shape, dequantised on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.files import FileRows
from foreword.models.quants import Quant, dequantize


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One weight: ``stored`` bytes in memory or in a file, a number format and a shape."""

    stored: U8 | FileRows
    quant: Quant
    shape: tuple[int, ...]

    @property
    def data(self) -> U8:
        """uint8 [rows, row_bytes], read from the file every time; rows = product of all dimensions but the last. Blocks
        of a quantised format run along the last dimension. ModelError if the file was changed since it was opened.
        """
        return self.stored.read() if isinstance(self.stored, FileRows) else self.stored

    def dequantize(self) -> F32:
        """The weight as float32 of ``shape``."""
        return dequantize(self.data, self.quant).reshape(self.shape)


def float_tensor(values: F32) -> Tensor:
    """A float32 array as a tensor of its shape."""
    flat = np.ascontiguousarray(values, "<f4").reshape(-1, values.shape[-1])
    return Tensor(flat.view(np.uint8), Quant.F32, values.shape)


# Canonical name (`foreword.models.spec.weight_names`) → tensor.
Weights = Mapping[str, Tensor]
