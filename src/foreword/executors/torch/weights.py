"""Weights as tensors of one number format on one device, and products of matrices that share an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from foreword.arrays import F32, U8
from foreword.errors import ConfigError
from foreword.executors.options import TorchWeightFormat
from foreword.executors.torch.grouped import aligned, grouped
from foreword.executors.torch.integers import Int8Matrix, IntegerMatrix, Q4Matrix
from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.shard import Shard, Shards
from foreword.models.quants import dequantize, grid_of
from foreword.models.weights import Tensor as Stored
from foreword.models.weights import Weights

_PART = 1 << 22
"""Weights that are dequantised at once."""

Split = Literal["outputs", "inputs"]
"""The part of a matrix that is divided among ranks: its rows or its columns."""

_INTEGERS: dict[TorchWeightFormat, type[IntegerMatrix]] = {"int8": Int8Matrix, "q4": Q4Matrix}


@dataclass(frozen=True, slots=True)
class Linear:
    """Matrices ``parts`` (canonical names) of one input as a single product, their outputs side by side.

    outputs: the rows of each part that this rank has; inputs: the columns.
    weight: [Σ outputs, inputs], in the model's dtype or in integers; bias: [Σ outputs] or None.
    total: the ranks whose outputs are added up, where each has a part of the inputs.
    """

    parts: tuple[str, ...]
    outputs: tuple[range, ...]
    inputs: range
    weight: Tensor | IntegerMatrix
    bias: Tensor | None = None
    total: Shard | None = None
    num_experts: ClassVar[int] = 0

    def __call__(self, x: Tensor, loras: ProductChanges | None = None) -> Tensor:
        """Return x Wᵀ + bias, plus the changes of the adapters: [T, inputs] → [T, Σ outputs]."""
        if isinstance(self.weight, IntegerMatrix):
            out = self.weight.product(x, self.bias)
        else:
            out = linear(x, self.weight, self.bias)
        out = out if loras is None else loras.apply(out, x, self.parts)
        return out if self.total is None else self.total.sum(out)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """The matrices ``parts`` of each expert, with {e} in place of its number, one below the other: see `Linear`.

    weight: [num_experts, Σ outputs, aligned(inputs)].
    """

    parts: tuple[str, ...]
    outputs: tuple[range, ...]
    inputs: range
    weight: Tensor

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def __call__(
        self, x: Tensor, ends: Tensor, experts: Tensor, tokens: Tensor, loras: ProductChanges | None
    ) -> Tensor:
        """Return the products of rows of x, sorted by expert, plus the changes of the adapters: [N, inputs] →
        [N, Σ outputs]. ends: see `grouped`. experts, tokens: of each row.
        """
        out = grouped(x, self.weight, ends)
        return out if loras is None else loras.apply_by_expert(out, x, self.parts, experts, tokens)


class Loader:
    """Reads ``weights`` into tensors of ``dtype`` on ``device``, a few rows at a time: apart from the tensors that it
    returns, it takes a small constant amount of memory.

    shards: of which one is read of a matrix that ranks divide (``split``): by default that of all ranks.
    weight_format: of the matrices of `linear`. "auto": in ``dtype``; "int8": 8 bits, with a scale per row; "q4":
    4 bits, with a scale and an offset per 32 columns.

    Raise ConfigError where PyTorch has no product of such matrices.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        shards: Shards | None = None,
        weight_format: TorchWeightFormat = "auto",
    ) -> None:
        self.weights, self.device, self.dtype, self.shards = weights, device, dtype, shards or Shards()
        self.weight_format = weight_format
        self._linears: dict[tuple[object, ...], Linear] = {}

    def __call__(self, name: str, dtype: torch.dtype | None = None, *, split: Split | None = None) -> Tensor:
        """Return the weight, in its own shape."""
        return self._joined([name], dtype, split).reshape(-1, *self.weights[name].shape[1:])

    def linear(
        self,
        prefix: str,
        names: Iterable[str],
        *,
        biases: Iterable[str] = (),
        split: Split | None = None,
        among: Shard | None = None,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """Return the matrices prefix + name as one product, which is read once. biases: the names that have one. among:
        the ranks of ``split``, None for all. dtype: that of the matrices, whatever the weight format.
        """
        among = among or self.shards.all
        parts, with_bias = tuple(prefix + name for name in names), tuple(prefix + name for name in biases)
        key = parts, with_bias, split, among, dtype
        if key not in self._linears:
            self._linears[key] = self._linear(parts, with_bias, split, among, dtype)
        return self._linears[key]

    def _linear(
        self,
        parts: tuple[str, ...],
        with_bias: tuple[str, ...],
        split: Split | None,
        among: Shard,
        dtype: torch.dtype | None,
    ) -> Linear:
        """Return `linear` of the matrices ``parts``, of which some have a bias."""
        outputs, inputs = zip(*(_part(self.weights[part], split, among) for part in parts), strict=True)
        bias = None
        if with_bias:
            sizes = [len(rows) for rows in outputs]
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for part, rows, own in zip(parts, outputs, bias.split(sizes), strict=True):
                if part in with_bias and (split != "inputs" or among.rank == 0):  # the outputs are added up
                    self._read(self.weights[part + "_bias"], own[None], range(1), rows)
        total = among if split == "inputs" and among.size > 1 else None
        if self.weight_format != "auto" and dtype is None:
            return Linear(parts, outputs, inputs[0], self._integers(parts, outputs, inputs[0]), bias, total)
        # On CPUs, float32 products of few rows are up to twice as fast with this layout; those of bfloat16 are slower.
        dtype = dtype or self.dtype
        by_column = dtype is torch.float32 and self.device.type == "cpu"
        weight = self._joined(parts, dtype, split, among, by_column=by_column)
        return Linear(parts, outputs, inputs[0], weight, bias, total)

    def plain(self, name: str) -> Linear:
        """Return `linear` of one matrix in ``dtype``, whatever the weight format."""
        return self.linear("", [name], dtype=self.dtype)

    def of_block(
        self, block: str, prefix: str, names: Sequence[str], *, split: Split, among: Shard | None = None
    ) -> Linear:
        """Return `linear` of matrices that several layers have in common. block, prefix: the beginnings of their names,
        and of those of their changes in one of the layers.
        """
        of_all = self.linear(block, names, split=split, among=among)
        return replace(of_all, parts=tuple(prefix + name for name in names))

    def experts(self, prefix: str, count: int, names: Sequence[str], *, split: Split) -> ExpertLinear:
        """Return the matrices of ``count`` experts. prefix: of their names, with {e} in place of the expert. Raise
        ConfigError for integers, which `grouped` lacks.
        """
        if self.weight_format != "auto":
            raise ConfigError(
                f"weight_format={self.weight_format!r}: PyTorch has no such product of experts; leave it out"
            )
        parts = tuple(prefix + name for name in names)
        of_each = [_part(self.weights[part.format(e=0)], split, self.shards.all) for part in parts]
        outputs, inputs = tuple(rows for rows, _ in of_each), of_each[0][1]
        sizes, columns = [len(rows) for rows in outputs], len(inputs)
        out = torch.zeros(count, sum(sizes), aligned(columns), dtype=self.dtype, device=self.device)
        for e, matrix in enumerate(out):
            for part, own, (rows, _) in zip(parts, matrix.split(sizes), of_each, strict=True):
                self._read(self.weights[part.format(e=e)], own[:, :columns], rows, inputs)
        return ExpertLinear(parts, outputs, inputs, out)

    def expert_biases(self, linear: ExpertLinear, *, split: Split) -> Tensor:
        """Return the biases of the matrices of experts, [experts, Σ outputs]. If ranks add up their outputs, one of
        them alone has the biases.
        """
        each = ([part.format(e=e) for part in linear.parts] for e in range(linear.num_experts))
        return torch.stack([self._biases(names, split) for names in each])

    def among_heads(self, name: str) -> Tensor:
        """Return the rank's part of a vector with a number for each head."""
        part = self.shards.heads.part(self.weights[name].shape[0])
        return self(name)[part.start : part.stop]

    def _biases(self, names: Sequence[str], split: Split) -> Tensor:
        if split == "inputs" and self.shards.all.rank:
            return torch.zeros(sum(self.weights[name].shape[0] for name in names), dtype=self.dtype, device=self.device)
        rows = [_part(self.weights[name], split, self.shards.all)[0] for name in names]
        biases = [self(f"{name}_bias")[own.start : own.stop] for name, own in zip(names, rows, strict=True)]
        return torch.cat(biases)

    def _joined(
        self,
        names: Sequence[str],
        dtype: torch.dtype | None = None,
        split: Split | None = None,
        among: Shard | None = None,
        *,
        by_column: bool = False,
    ) -> Tensor:
        """Return the rows of all weights [Σ rows, columns]. by_column: whether a column is contiguous, instead of a
        row.
        """
        tensors = [self.weights[name] for name in names]
        parts = [_part(tensor, split, among or self.shards.all) for tensor in tensors]
        sizes = [len(rows) for rows, _ in parts]
        shape = sum(sizes), len(parts[0][1])
        out = torch.empty(shape[::-1] if by_column else shape, dtype=dtype or self.dtype, device=self.device)
        out = out.t() if by_column else out
        for tensor, own, part in zip(tensors, out.split(sizes), parts, strict=True):
            self._read(tensor, own, *part)
        return out

    def _integers(self, names: Sequence[str], outputs: Sequence[range], inputs: range) -> IntegerMatrix:
        """Return these rows of all weights, one below the other, and these columns, as integers."""
        matrix, end = _INTEGERS[self.weight_format](sum(map(len, outputs)), inputs, self.dtype, self.device), 0
        for name, rows in zip(names, outputs, strict=True):
            quant = self.weights[name].quant
            for stored in _stored(self.weights[name], rows):
                part = slice(end, end := end + len(stored))
                matrix.set_rows(part, dequantize(stored, quant), grid_of(stored, quant))
        matrix.finish()
        return matrix

    @staticmethod
    def _read(tensor: Stored, out: Tensor, rows: range, columns: range) -> None:
        """Write a part of a weight to ``out`` [rows, columns]."""
        end = 0
        for values in _decoded(tensor, rows, columns):
            out[end : (end := end + len(values))].copy_(torch.from_numpy(values))


def _part(tensor: Stored, split: Split | None, among: Shard) -> tuple[range, range]:
    """Return the rows and the columns of a weight that this rank reads."""
    rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
    return (
        among.part(rows) if split == "outputs" else range(rows),
        among.part(columns) if split == "inputs" else range(columns),
    )


def _decoded(tensor: Stored, rows: range, columns: range) -> Iterator[F32]:
    """Yield a part of a weight, a few rows at a time: of a quantised one, whole blocks are decoded."""
    quant = tensor.quant
    first, last = columns.start // quant.block_size, -(-columns.stop // quant.block_size)
    begin = columns.start - first * quant.block_size
    for stored in _stored(tensor, rows):
        values = dequantize(stored[:, first * quant.block_bytes : last * quant.block_bytes], quant)
        yield values[:, begin : begin + len(columns)]


def _stored(tensor: Stored, rows: range) -> Iterator[U8]:
    """Yield rows of a weight as the file holds them, a few at a time."""
    width = tensor.shape[-1]
    step = max(1, _PART // width)
    for start in range(0, len(rows), step):
        own = rows[start : start + step]
        yield Stored(tensor.stored[own.start : own.stop], tensor.quant, (len(own), width)).data
