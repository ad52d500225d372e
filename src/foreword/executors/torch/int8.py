"""Matrices of 8-bit integers with a scale per row, through PyTorch's own product of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from foreword.arrays import F32
from foreword.errors import ConfigError

_MOST = 127
_ALIGNMENT = 16  # columns: PyTorch's product reads past the end of other rows
_FEW_ROWS = 16  # of more, PyTorch's product takes longer than one in floating point after a copy of the matrix


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """The matrix values[i, j] · scales[i].

    values: int8 [outputs, inputs], with columns of zeros up to a multiple of 16. scales: [outputs], of the dtype of
    what is multiplied.
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def empty(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Int8Matrix:
        """A matrix that `set_rows` fills. ConfigError if PyTorch has no product of 8-bit integers on the device."""
        columns = inputs + -inputs % _ALIGNMENT
        matrix = Int8Matrix(
            torch.zeros(outputs, columns, dtype=torch.int8, device=device),
            torch.empty(outputs, dtype=dtype, device=device),
        )
        try:
            torch._weight_int8pack_mm(matrix.scales.new_zeros(1, columns), matrix.values, matrix.scales)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"weight_format='int8': PyTorch {torch.__version__} has no such product on {device} in {dtype} "
                f"({type(error).__name__}); leave it out"
            ) from error
        return matrix

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)

    def set_rows(self, rows: slice, weights: F32, columns: range) -> None:
        """Round these columns of whole rows of weights. The scale of a row is its largest magnitude / 127, also if
        other columns have that.
        """
        floats = torch.from_numpy(weights)
        own = floats[:, columns.start : columns.stop]
        scales, limits = self.scales[rows], torch.finfo(self.scales.dtype)
        scales.copy_(floats.abs().amax(1).div_(_MOST).clamp_(min=limits.tiny * limits.eps))  # its least number
        exact = scales.to("cpu", torch.float32)[:, None]  # what the dtype holds of it
        self.values[rows, : len(columns)].copy_((own / exact).round_().clamp_(-_MOST, _MOST))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias: [T, inputs] → [T, outputs].

        Of many rows, with a copy of the matrix in their dtype for the time of the product. So also on CPUs in any dtype
        but bfloat16, for which alone PyTorch has a fast product of 8 bits.
        """
        inputs = x.shape[1]
        if len(x) > _FEW_ROWS or (x.device.type == "cpu" and x.dtype is not torch.bfloat16):
            return linear(x, self.values[:, :inputs].to(x.dtype).mul_(self.scales[:, None]), bias)
        missing = self.values.shape[1] - inputs
        x = pad(x, (0, missing)) if missing else x.contiguous()
        out = torch._weight_int8pack_mm(x, self.values, self.scales)
        return out if bias is None else out.add_(bias)
