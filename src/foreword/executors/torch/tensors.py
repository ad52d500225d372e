"""A batch's NumPy arrays as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from foreword.arrays import F32, AnyArray


def as_tensor(array: AnyArray, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a tensor of the array's values. On the CPU it shares the array's memory, which may be read-only: do not
    write to it.
    """
    return torch.from_dlpack(array).to(device)


def as_floats(tensor: torch.Tensor) -> F32:
    """Return the tensor's values in host memory, shared with it if it is float32 there."""
    floats: F32 = tensor.float().cpu().numpy()
    return floats
