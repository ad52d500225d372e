"""vLLM's own kernels in Triton's interpreter, taken from its source files without importing vLLM.

A file's jitted functions and constants are compiled in its own name, so that Triton finds their source; functions of
other modules are looked up there. Needs TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from foreword.vllm.kernels import PACKAGE


def _one_bit(operation: str, mask: int) -> None:
    """Make the interpreter take a loaded bool as a mask: it keeps int8, of which the compiler reads one bit."""
    original = getattr(InterpreterBuilder, operation)

    def taken(self: InterpreterBuilder, pointers: Any, *args: Any) -> Any:
        args[mask].data = (args[mask].data & 1).astype(np.bool_)
        return original(self, pointers, *args)

    setattr(InterpreterBuilder, operation, taken)


_one_bit("create_masked_load", 0)
_one_bit("create_masked_store", 1)


@triton.jit
def _isnan(x):
    return x != x


def _log1p(x: tl.tensor) -> tl.tensor:
    """CUDA's log1p has no counterpart in the interpreter: NumPy's."""
    return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


class Sources:
    """The kernels of a vLLM whose package is in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._modules: dict[str, dict[str, Any]] = {}

    def kernel(self, name: str) -> Any:
        """Return a kernel by its full name."""
        module, _, function = name.rpartition(".")
        return self._module(module)[function]

    def _module(self, name: str) -> dict[str, Any]:
        if name not in self._modules:
            path = self._directory.joinpath(*name.split(".")[1:]).with_suffix(".py")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            namespace: dict[str, Any] = {
                "__name__": name,
                "triton": triton,
                "tl": tl,
                "torch": torch,
                "HAS_TRITON": True,
                "tldevice": SimpleNamespace(log1p=_log1p),
                "libdevice": SimpleNamespace(isnan=_isnan),
            }
            self._modules[name] = namespace
            kept: list[ast.stmt] = []
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
                    other = self._directory.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
                    if other.exists():
                        names = self._module(str(node.module))
                        namespace |= {a.name: names[a.name] for a in node.names if a.name in names}
                elif _is_jitted(node) or _is_constant(node):
                    kept.append(node)
            for node in kept:
                with suppress(NameError):  # a constant made of another module's
                    exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
        return self._modules[name]

    def launch(self, name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Launch a kernel on arrays. Arguments that this version of the kernel does not have are left out."""
        kernel = self.kernel(name)
        taken = {key: value for key, value in arguments.items() if key in kernel.arg_names}
        kernel[grid](**{key: _tensor(value, key) for key, value in taken.items()})


def _tensor(value: Any, name: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor


def _is_jitted(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def _is_constant(node: ast.stmt) -> bool:
    """Return whether a statement assigns a number, or a constant of Triton."""
    if not isinstance(node, ast.Assign):
        return False
    text = ast.unparse(node.value)
    return "tl.constexpr" in text or isinstance(node.value, ast.Constant)
