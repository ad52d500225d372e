"""Weights as stored in a file: raw bytes with a number format and a shape, dequantised on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.files import ModelFile, StoredRows
from foreword.models.quants import Quant, dequantize


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One weight: ``stored`` bytes in memory or as rows to read, a number format and a shape."""

    stored: U8 | StoredRows
    quant: Quant
    shape: tuple[int, ...]

    @property
    def data(self) -> U8:
        """The weights as uint8 [rows, row_bytes], read again every time unless in memory; rows = product of all
        dimensions but the last one. Blocks of a quantised format run along it. Raise ModelError as `StoredRows.read`
        does.
        """
        return self.stored if isinstance(self.stored, np.ndarray) else self.stored.read()

    def dequantize(self) -> F32:
        """Return the weight as float32 of ``shape``."""
        return dequantize(self.data, self.quant).reshape(self.shape)


def float_tensor(values: F32) -> Tensor:
    """Return a float32 array as a tensor of its shape."""
    flat = np.ascontiguousarray(values, "<f4").reshape(prod(values.shape[:-1]), values.shape[-1])
    return Tensor(flat.view(np.uint8), Quant.F32, values.shape)


# Canonical name (`foreword.models.spec.weight_names`) → tensor.
Weights = Mapping[str, Tensor]


class FileWeights(dict[str, Tensor]):
    """Weights that follow from the bytes of files and a configuration, and from nothing else.

    config: values of JSON; none if the files hold it.
    """

    def __init__(
        self, weights: Weights, files: Iterable[ModelFile], config: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(weights)
        self.files, self.config = tuple(files), config or {}
