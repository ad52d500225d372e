"""Weights as tensors of one number format on one device, and products of matrices that share an input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.executors.torch.grouped import aligned
from foreword.executors.torch.loras import StepLoras
from foreword.models.weights import Tensor as Stored
from foreword.models.weights import Weights

_PART = 1 << 22
"""Weights that are dequantised at once."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Matrices ``parts`` (canonical names) of one input as a single product, their outputs side by side.

    sizes: outputs of each part. weight: [Σ sizes, in]; bias: [Σ sizes] or None.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, loras: StepLoras | None = None) -> Tensor:
        """x Wᵀ + bias, plus the changes of the adapters: [T, in] → [T, Σ sizes]."""
        out = linear(x, self.weight, self.bias)
        return out if loras is None else loras.add(out, x, self.parts)


class Loader:
    """Reads ``weights`` into tensors of ``dtype`` on ``device``, a few rows at a time: apart from the tensors that it
    returns, it takes a small constant amount of memory.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self.weights, self.device, self.dtype = weights, device, dtype

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The weight, in its own shape."""
        return self._joined([name], dtype).view(self.weights[name].shape)

    def linear(self, prefix: str, names: Iterable[str], *, biases: Iterable[str] = ()) -> Linear:
        """The matrices prefix + name as one product. biases: the names that have one."""
        parts, with_bias = tuple(prefix + name for name in names), {prefix + name for name in biases}
        sizes = tuple(self.weights[part].shape[0] for part in parts)
        bias = None
        if with_bias:
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for part, rows in zip(parts, bias.split(sizes), strict=True):
                if part in with_bias:
                    self._read(self.weights[part + "_bias"], rows[None])
        # On CPUs, float32 products of few rows are up to twice as fast with this layout; those of bfloat16 are slower.
        by_column = self.dtype is torch.float32 and self.device.type == "cpu"
        return Linear(parts, sizes, self._joined(parts, by_column=by_column), bias)

    def stacked(self, prefixes: Sequence[str], names: Sequence[str]) -> Tensor:
        """[len(prefixes), rows of all names, columns]: of each prefix, its matrices one below the other, with columns
        of zeros for `grouped`.
        """
        shapes = [self.weights[prefixes[0] + name].shape for name in names]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
        out = torch.zeros(len(prefixes), rows, aligned(columns), dtype=self.dtype, device=self.device)
        for prefix, matrix in zip(prefixes, out, strict=True):
            for name, part in zip(names, matrix.split([shape[0] for shape in shapes]), strict=True):
                self._read(self.weights[prefix + name], part[:, :columns])
        return out

    def _joined(self, names: Sequence[str], dtype: torch.dtype | None = None, *, by_column: bool = False) -> Tensor:
        """The rows of all weights [Σ rows, columns]. by_column: whether a column is contiguous, instead of a row."""
        tensors = [self.weights[name] for name in names]
        sizes = [prod(tensor.shape[:-1]) for tensor in tensors]
        shape = sum(sizes), tensors[0].shape[-1]
        out = torch.empty(shape[::-1] if by_column else shape, dtype=dtype or self.dtype, device=self.device)
        out = out.t() if by_column else out
        for tensor, rows in zip(tensors, out.split(sizes), strict=True):
            self._read(tensor, rows)
        return out

    @staticmethod
    def _read(tensor: Stored, out: Tensor) -> None:
        """Write a weight to ``out`` [rows, columns]."""
        columns = tensor.shape[-1]
        step = max(1, _PART // columns)
        for start in range(0, len(out), step):
            rows = out[start : start + step]
            part = Stored(tensor.stored[start : start + step], tensor.quant, (len(rows), columns))
            rows.copy_(torch.from_numpy(part.dequantize()))
