"""Matrices of small integers with scales, through PyTorch's own products of them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from foreword.arrays import F32
from foreword.errors import ConfigError

Grid = tuple[F32, F32]
"""The step between the weights of each group of 32 columns, and its least weight, [rows, groups] each."""

GROUP = 32  # columns with a scale of their own in 4 bits: the least that PyTorch has, and the blocks of 4-bit files


class IntegerMatrix(ABC):
    """Rounded weights: ``outputs`` rows, of whose columns those of ``inputs`` are multiplied.

    Held are all columns of the ``unit`` blocks that have some of ``inputs``, up to zeros in the last one. So a matrix
    of some columns has the numbers of the whole one.

    Raise ConfigError if PyTorch has no such product on the device in this dtype, which is that of what is multiplied.
    """

    name: ClassVar[str]
    unit: ClassVar[int]
    few_rows: int
    """With more rows than this, PyTorch's product takes longer than one in floating point after a copy of the matrix.
    """

    def __init__(self, outputs: int, inputs: range, dtype: torch.dtype, device: torch.device) -> None:
        self.outputs = outputs
        self.columns = range(inputs.start // self.unit * self.unit, -(-inputs.stop // self.unit) * self.unit)
        self._others = inputs.start - self.columns.start, self.columns.stop - inputs.stop  # columns before and after
        self.values, self.scales = self._allocate(outputs, len(self.columns), dtype, device)
        try:
            self._product(torch.zeros(1, len(self.columns), dtype=dtype, device=device))
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"weight_format={self.name!r}: PyTorch {torch.__version__} has no such product on {device} in {dtype} "
                f"({type(error).__name__}); leave it out"
            ) from error

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)

    def set_rows(self, rows: slice, weights: F32, grid: Grid | None) -> None:
        """Round whole rows of weights. grid: what the file holds of them, if that has 4 bits."""
        floats, (first, end) = torch.from_numpy(weights), (self.columns.start, self.columns.stop)
        own = floats[:, first:end]
        self._round(rows, pad(own, (0, len(self.columns) - own.shape[1])), floats, grid)

    @abstractmethod
    def finish(self) -> None:
        """Prepare the product after every row was set."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias: [T, inputs] → [T, outputs].

        Of many rows, with a copy of the matrix in their dtype for the time of the product. So also on CPUs in any dtype
        but bfloat16, for which alone PyTorch has fast products of integers.
        """
        if len(x) > self.few_rows or (x.device.type == "cpu" and x.dtype is not torch.bfloat16):
            before = self._others[0]
            return linear(x, self._floats()[: self.outputs, before : before + x.shape[1]], bias)
        x = pad(x, self._others) if any(self._others) else x.contiguous()
        out = self._product(x)[:, : self.outputs].contiguous()
        return out if bias is None else out.add_(bias)

    @abstractmethod
    def _allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the integers, all zero, and the scales."""

    @abstractmethod
    def _round(self, rows: slice, own: Tensor, whole: Tensor, grid: Grid | None) -> None:
        """Set ``rows`` from their weights: those of ``columns``, and those of all columns."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """Return PyTorch's product, for x [T, columns]."""

    @abstractmethod
    def _floats(self) -> Tensor:
        """Return the weights in the dtype of the scales, [at least outputs, columns]."""


class Int8Matrix(IntegerMatrix):
    """The matrix values[i, j] · scales[i]: int8 [outputs, columns] and [outputs].

    A row is rounded to 127 steps of its largest magnitude, also if that is in another rank's columns.
    """

    name, unit = "int8", 16  # PyTorch's product reads past the end of other rows
    few_rows = 16

    def _allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        values = torch.zeros(rows, columns, dtype=torch.int8, device=device)
        return values, torch.zeros(rows, dtype=dtype, device=device)

    def _round(self, rows: slice, own: Tensor, whole: Tensor, grid: Grid | None) -> None:
        scales, limits = self.scales[rows], torch.finfo(self.scales.dtype)
        scales.copy_(whole.abs().amax(1).div_(127).clamp_(min=limits.tiny * limits.eps))  # its least number
        exact = scales.to("cpu", torch.float32)[:, None]  # rounded as the dtype holds it
        self.values[rows].copy_((own / exact).round_().clamp_(-127, 127))

    def finish(self) -> None:
        """See `IntegerMatrix.finish`."""

    def _product(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.values, self.scales)

    def _floats(self) -> Tensor:
        return self.values.to(self.scales.dtype).mul_(self.scales[:, None])


class Q4Matrix(IntegerMatrix):
    """The matrix (n[i, j] − 8) · scales[g, i, 0] + scales[g, i, 1] of integers n below 16 and groups g of 32 columns.

    scales: [groups, rows, 2], where rows is a multiple of 64. values: uint8 [rows, columns / 2]; while rows are set,
    even columns are in the high halves of bytes and odd ones in the low halves; then they are in PyTorch's layout for
    the device.

    A group is rounded to 16 steps: those of a file with 4 bits, else from its least weight to its largest.
    """

    name, unit = "q4", GROUP
    few_rows = 64

    def _allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            self._block, self._is_paired = _cpu_layout()
        else:
            self.few_rows = sys.maxsize  # no copy: the layout is for the product alone
        self._tiles = next(count for count in (8, 4, 2) if columns % (16 * count) == 0)  # CUDA: of a thread
        rows = -(-rows // _BLOCK) * _BLOCK
        values = torch.zeros(rows, columns // 2, dtype=torch.uint8, device=device)
        return values, torch.zeros(columns // GROUP, rows, 2, dtype=dtype, device=device)

    def _round(self, rows: slice, own: Tensor, whole: Tensor, grid: Grid | None) -> None:
        groups = own.unflatten(1, (-1, GROUP))
        if grid is None:
            least, largest = groups.aminmax(dim=-1)
            steps = largest / 15 - least / 15
        else:
            part = slice(self.columns.start // GROUP, self.columns.stop // GROUP)
            steps, least = (torch.from_numpy(field)[:, part] for field in grid)
        scales = torch.stack((steps, least + 8 * steps), -1).to(self.scales.dtype)
        self.scales[:, rows].copy_(scales.transpose(0, 1))
        step, middle = scales.float().unsqueeze(2).unbind(-1)  # rounded as the dtype holds them
        n = (((groups - middle) / step.where(step != 0, 1)).round_() + 8).clamp_(0, 15).flatten(1).byte()
        self.values[rows].copy_(n[:, ::2] << 4 | n[:, 1::2])

    def finish(self) -> None:
        """See `IntegerMatrix.finish`."""
        for part in self.values.split(16 * _BLOCK):
            part.copy_(self._packed(part).view(torch.uint8).view(part.shape))

    def _packed(self, values: Tensor) -> Tensor:
        """Return rows in PyTorch's layout."""
        if self._on_cpu:
            integers = torch.stack((values >> 4, values & 15), -1).flatten(1).int()
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, self._tiles)
        return torch.ops.aten._convert_weight_to_int4pack(values, self._tiles)

    def _product(self, x: Tensor) -> Tensor:
        if self._on_cpu:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.values, GROUP, self.scales)
        packed = self.values.view(torch.int32).view(len(self.values) // 8, -1, 32, self._tiles // 2)
        return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, self.scales)

    def _floats(self) -> Tensor:
        (rows, half), block = self.values.shape, self._block
        halves = torch.stack((self.values & 15, self.values >> 4)).view(2, rows // block, 2 * half, block // 2)
        by_row = halves.permute(1, 3, 0, 2) if self._is_paired else halves.permute(1, 0, 3, 2)
        groups = by_row.reshape(rows, -1, GROUP).to(self.scales.dtype)
        steps, middles = self.scales.transpose(0, 1).unsqueeze(2).unbind(-1)
        return groups.sub_(8).mul_(steps).add_(middles).flatten(1)


_BLOCK = 64  # rows: a multiple of those that are interleaved in every layout


def _cpu_layout() -> tuple[int, bool]:
    """Return PyTorch's layout of 4 bits on this processor: rows that are interleaved, so that a byte has two of them in
    one column; and whether these are neighbours, the first in the low half. If not, the second is half the rows
    further.
    """
    rows, columns = torch.arange(_BLOCK, dtype=torch.int32)[:, None], torch.arange(GROUP, dtype=torch.int32)
    numbers = (rows + 3 * (rows // 16) + 5 * columns) % 16  # differs where layouts do

    def packed(size: int) -> Tensor:
        return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(x, 2) for x in numbers.split(size)])

    block = next(size for size in (16, 32, _BLOCK) if torch.equal(packed(size), packed(_BLOCK)))
    return block, bool(packed(_BLOCK)[0, 0] >> 4 == numbers[1, 0])
