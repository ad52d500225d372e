"""Products of groups of rows with a matrix each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

_KERNEL_CAPABILITIES = (9, 10)  # the major ones of GPUs that PyTorch's kernel is made for
_ALIGNMENT = 8  # 16 bytes of the narrowest format


def aligned(columns: int) -> int:
    """Return the columns that matrices of `grouped` must have instead, filled with zeros."""
    return columns + -columns % _ALIGNMENT


def waits_for_host(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `grouped` reads ``ends`` on the host, so that no graph can be captured: on a GPU, unless PyTorch
    has a kernel for it. Its kernel is for bfloat16 alone.
    """
    if device.type != "cuda":
        return False
    has_kernel = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in _KERNEL_CAPABILITIES
    return not (has_kernel and dtype is torch.bfloat16)


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows [ends[i − 1], ends[i]) of x [N, in] times matrices[i]ᵀ. [N, out]

    matrices: [groups, out, aligned(in)]; ends: int32 [groups], ascending, the last one N.
    """
    missing = matrices.shape[2] - x.shape[1]
    return grouped_mm(pad(x, (0, missing)) if missing else x, matrices.transpose(1, 2), offs=ends)
