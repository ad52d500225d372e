"""Weights as tensors of one number format on one device, and products of matrices that share an input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.executors.torch.grouped import aligned
from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.shard import Shard
from foreword.models.quants import dequantize
from foreword.models.weights import Tensor as Stored
from foreword.models.weights import Weights

_PART = 1 << 22
"""Weights that are dequantised at once."""

Split = Literal["outputs", "inputs"]
"""What of a matrix is divided among ranks: its rows or its columns."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Matrices ``parts`` (canonical names) of one input as a single product, their outputs side by side.

    outputs: the rows of each part that this rank has; inputs: the columns.
    weight: [Σ outputs, inputs]; bias: [Σ outputs] or None.
    total: the ranks whose outputs are added up, where each has a part of the inputs.
    """

    parts: tuple[str, ...]
    outputs: tuple[range, ...]
    inputs: range
    weight: Tensor
    bias: Tensor | None = None
    total: Shard | None = None

    def __call__(self, x: Tensor, loras: ProductChanges | None = None) -> Tensor:
        """x Wᵀ + bias, plus the changes of the adapters: [T, inputs] → [T, Σ outputs]."""
        out = linear(x, self.weight, self.bias)
        out = out if loras is None else loras.add(out, x, self.parts)
        return out if self.total is None else self.total.sum(out)


class Loader:
    """Reads ``weights`` into tensors of ``dtype`` on ``device``, a few rows at a time: apart from the tensors that it
    returns, it takes a small constant amount of memory.

    shard: the part that is read of a matrix which ranks divide (``split``).
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype, shard: Shard | None = None) -> None:
        self.weights, self.device, self.dtype, self.shard = weights, device, dtype, shard or Shard()

    def __call__(self, name: str, dtype: torch.dtype | None = None, *, split: Split | None = None) -> Tensor:
        """The weight, in its own shape."""
        return self._joined([name], dtype, split).reshape(-1, *self.weights[name].shape[1:])

    def linear(
        self, prefix: str, names: Iterable[str], *, biases: Iterable[str] = (), split: Split | None = None
    ) -> Linear:
        """The matrices prefix + name as one product. biases: the names that have one."""
        parts, with_bias = tuple(prefix + name for name in names), {prefix + name for name in biases}
        outputs, inputs = zip(*(self._part(self.weights[part], split) for part in parts), strict=True)
        bias = None
        if with_bias:
            sizes = [len(rows) for rows in outputs]
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for part, rows, own in zip(parts, outputs, bias.split(sizes), strict=True):
                if part in with_bias:
                    self._read(self.weights[part + "_bias"], own[None], range(1), rows)
        # On CPUs, float32 products of few rows are up to twice as fast with this layout; those of bfloat16 are slower.
        by_column = self.dtype is torch.float32 and self.device.type == "cpu"
        total = self.shard if split == "inputs" and self.shard.size > 1 else None
        weight = self._joined(parts, split=split, by_column=by_column)
        return Linear(parts, outputs, inputs[0], weight, bias, total)

    def stacked(self, prefixes: Sequence[str], names: Sequence[str], *, split: Split) -> Tensor:
        """[len(prefixes), rows of all names, columns]: of each prefix, its matrices one below the other, with columns
        of zeros for `grouped`.
        """
        parts = [self._part(self.weights[prefixes[0] + name], split) for name in names]
        sizes, columns = [len(rows) for rows, _ in parts], len(parts[0][1])
        out = torch.zeros(len(prefixes), sum(sizes), aligned(columns), dtype=self.dtype, device=self.device)
        for prefix, matrix in zip(prefixes, out, strict=True):
            for name, own, part in zip(names, matrix.split(sizes), parts, strict=True):
                self._read(self.weights[prefix + name], own[:, :columns], *part)
        return out

    def _part(self, tensor: Stored, split: Split | None) -> tuple[range, range]:
        """The rows and the columns that this rank reads."""
        rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
        return (
            self.shard.part(rows) if split == "outputs" else range(rows),
            self.shard.part(columns) if split == "inputs" else range(columns),
        )

    def _joined(
        self,
        names: Sequence[str],
        dtype: torch.dtype | None = None,
        split: Split | None = None,
        *,
        by_column: bool = False,
    ) -> Tensor:
        """The rows of all weights [Σ rows, columns]. by_column: whether a column is contiguous, instead of a row."""
        tensors = [self.weights[name] for name in names]
        parts = [self._part(tensor, split) for tensor in tensors]
        sizes = [len(rows) for rows, _ in parts]
        shape = sum(sizes), len(parts[0][1])
        out = torch.empty(shape[::-1] if by_column else shape, dtype=dtype or self.dtype, device=self.device)
        out = out.t() if by_column else out
        for tensor, own, part in zip(tensors, out.split(sizes), parts, strict=True):
            self._read(tensor, own, *part)
        return out

    @staticmethod
    def _read(tensor: Stored, out: Tensor, rows: range, columns: range) -> None:
        """Write a part of a weight to ``out`` [rows, columns]: of a quantised one, whole blocks are decoded."""
        quant, width = tensor.quant, tensor.shape[-1]
        first, last = columns.start // quant.block_size, -(-columns.stop // quant.block_size)
        begin, step = columns.start - first * quant.block_size, max(1, _PART // width)
        for start in range(0, len(rows), step):
            own = rows[start : start + step]
            stored = Stored(tensor.stored[own.start : own.stop], quant, (len(own), width)).data
            values = dequantize(stored[:, first * quant.block_bytes : last * quant.block_bytes], quant)
            out[start : start + step].copy_(torch.from_numpy(values[:, begin : begin + len(columns)]))
