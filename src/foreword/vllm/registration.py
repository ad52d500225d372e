"""vLLM's second model runner without Triton: its kernels replaced by functions of this package, in this process.

`vllm.triton_utils.dispatcher.register_kernels` is not used: it drops the grid of a launch, from which several kernels
take the number of requests.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import vllm.config.vllm
import vllm.triton_utils
import vllm.v1.worker.gpu_worker
from vllm import envs

from foreword.vllm.kernels import KERNELS, PACKAGE, check_arguments

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "launch_pdl"}
"""Arguments of a launch that are Triton's, not the kernel's."""


class LaunchedFunction:
    """A function in place of a Triton kernel: ``kernel[grid](…)`` calls it with arrays in place of tensors.

    The tensors are of the CPU; the arrays share their memory. bfloat16 becomes uint16 of the same bits.
    """

    def __init__(self, function: Callable[..., None], arguments: tuple[str, ...]) -> None:
        self._function = function
        self.arg_names = arguments

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: object, **kwargs: object) -> None:
        arguments = {name: _host(value) for name, value in zip(self.arg_names, args, strict=False)}
        arguments |= {name: _host(value) for name, value in kwargs.items() if name not in LAUNCH_OPTIONS}
        self._function(grid, **arguments)


def _host(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()


def register() -> None:
    """Replace the kernels, and let vLLM take the second model runner although Triton is missing. A second call changes
    nothing.

    Call it in every process of vLLM before the engine is made; `vllm.general_plugins` does so by `plugin`. Raise
    ConfigError if a kernel of the installed version of vLLM has other arguments than the functions know.
    """
    found: list[tuple[str, object, LaunchedFunction]] = []
    for name, function in KERNELS.items():
        module_name, _, attribute = name.rpartition(".")
        module = import_module(module_name)
        kernel = getattr(module, attribute)
        if isinstance(kernel, LaunchedFunction):
            return
        arguments = tuple(inspect.signature(kernel).parameters)
        check_arguments(name, arguments)
        found.append((attribute, kernel, LaunchedFunction(function, arguments)))
    workers = [vars(module) for name, module in sys.modules.items() if name.startswith("vllm.v1.worker.")]
    for attribute, kernel, launched in found:
        for names in workers:  # a module may have imported the kernel of another one
            if names.get(attribute) is kernel:
                names[attribute] = launched
    vllm.triton_utils.triton.next_power_of_2 = _next_power_of_2
    for module in (
        vllm.config.vllm,
        vllm.v1.worker.gpu_worker,
        import_module(f"{PACKAGE}.spec_decode.ngram.speculator"),
    ):
        if "HAS_TRITON" in vars(module):  # the modules that ask differ between versions
            vars(module)["HAS_TRITON"] = True


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def plugin() -> None:
    """Register, where the second model runner is asked for and could not run: for the entry point of vLLM's plugins."""
    if envs.VLLM_USE_V2_MODEL_RUNNER and not vllm.triton_utils.HAS_TRITON:
        register()
