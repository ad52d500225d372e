"""The device and the number format that a model runs in, by name."""

from __future__ import annotations

import os
import shutil

import torch

from foreword.device.cuda import gpu_of
from foreword.errors import ConfigError
from foreword.executors.options import DType
from foreword.machine import VARIABLE, default_threads
from foreword.models.quants import Quant
from foreword.models.weights import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: DType, weights: Weights) -> torch.dtype:
    """Return the dtype of this name. auto: float32 if the embedding is stored so, else bfloat16."""
    if name == "auto":
        name = "fp32" if weights["embed"].quant is Quant.F32 else "bf16"
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """Return the device of the option ``device``. Raise ConfigError for a GPU that this machine lacks."""
    return torch.device(name) if name == "cpu" else gpu_of(name)


def device_of_rank(name: str, rank: int, size: int, num_devices: int) -> str:
    """Return the device of a rank of ``size`` ranks on a machine with ``num_devices`` CUDA devices: "cpu" for "cpu",
    and a device of its own for "cuda". Raise ConfigError for another name, and for fewer devices than ranks.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={name!r:.80}: the {size} processes of a model run on 'cpu', or on 'cuda', each on a device of its "
            "own; choose these with CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" and size > num_devices:
        raise ConfigError(
            f"device='cuda': the {size} processes of the model need {size} CUDA devices, PyTorch finds {num_devices}; "
            "use as many processes, or 'cpu'"
        )
    return f"cuda:{rank}" if name == "cuda" else name


def check_compiler() -> None:
    """Raise ConfigError unless ``torch.compile`` finds the C++ compiler that it needs."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"compile=True: torch.compile needs the C++ compiler {name!r}, which is not here; leave it out"
        )


def use_threads(num_threads: int | None) -> None:
    """Set the threads of PyTorch's operators, in the whole process; None: `usual_threads`."""
    torch.set_num_threads(num_threads or usual_threads())


def usual_threads() -> int:
    """Return the default of `foreword.machine`, at most what PyTorch uses unless the variable says otherwise."""
    usual = default_threads()
    return usual if os.environ.get(VARIABLE) else min(usual, torch.get_num_threads())
