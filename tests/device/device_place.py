"""Where the kernels of these tests run: in Triton's interpreter, or with TESTS_ON_GPU=1 on the GPU."""

import os

import numpy as np
import torch

ON_GPU = os.environ.get("TESTS_ON_GPU") == "1"
WHERE = "cuda" if ON_GPU else "cpu"

if ON_GPU:
    from foreword.device.cuda import CudaDevice as Device
else:
    from foreword.device.interpreter import InterpretedDevice as Device

__all__ = ["ON_GPU", "WHERE", "Device", "host", "to_device"]


def to_device(array: np.ndarray) -> torch.Tensor:
    """Return the array as a tensor where the kernels run. In the interpreter it shares the array's memory."""
    return torch.from_numpy(array).to(WHERE)


def host(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor. In the interpreter the array shares the tensor's memory."""
    return tensor.cpu().numpy()
