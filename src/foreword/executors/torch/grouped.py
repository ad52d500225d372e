"""Products of groups of rows with a matrix each."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import grouped_mm, pad

_ALIGNMENT = 8  # 16 bytes of the narrowest format


def aligned(columns: int) -> int:
    """The columns that matrices of `grouped` must have instead, filled with zeros."""
    return columns + -columns % _ALIGNMENT


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[i − 1], ends[i]) of x [N, in] times matrices[i]ᵀ. [N, out]

    matrices: [groups, out, aligned(in)]; ends: int32 [groups], ascending, the last one N.
    """
    missing = matrices.shape[2] - x.shape[1]
    return grouped_mm(pad(x, (0, missing)) if missing else x, matrices.transpose(1, 2), offs=ends)
