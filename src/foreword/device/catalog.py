"""The kernels by name, and the argument types for which they are compiled ahead of time.

Callers launch kernels by name, so that they do not import Triton; a device imports it when it launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from foreword.device.attention import Tile, power_of_two
from foreword.device.layout import DEVICE_FIELDS, PREPARED, StepTensors


class Kernel(NamedTuple):
    """A kernel of ``foreword.device.kernels.<module>``.

    types: the types of its arguments in order, as Triton writes them ("*i32": a pointer); a tuple for an argument with
    several values. constants: the sizes with which the table of compiled kernels shows it, by name; a type is given by
    its name.
    function: its name in the module; None: the name under which it is listed. options: the options of the compiler.
    """

    module: str
    types: tuple[str | tuple[str, ...], ...]
    constants: Mapping[str, Any]
    function: str | None = None
    options: Mapping[str, int] = MappingProxyType({})


_ARENA = ("*i32", "*i32")  # arena, packet
_ROWS = ("*i32", *_ARENA)  # arena, tokens, packet
_POINTERS = {"int32": "*i32", "int64": "*i64", "bool": "*i1"}
_STEP = StepTensors(*(_POINTERS[DEVICE_FIELDS[name].dtype] for name in PREPARED))
_ATTENTION = {"HEADS": 14, "KV_HEADS": 2, "DIM": 64, "VALUE_DIM": 64}


def _write_keys(cache: str, fp8: bool) -> Kernel:
    """Return K3 for a type ``cache`` of keys and values."""
    types = (
        "*i32", "*bf16", "*bf16", cache, cache, "*fp32", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "*bf16", "*bf16",
        "fp32", *("i32",) * 5,
    )  # fmt: skip
    constants = {**_ATTENTION, "PAIRS": 32, "NORM": True, "FP8": fp8, "BLOCK_DIM": 64}
    return Kernel("keys", types, constants, "write_keys")


def attend_kernel(
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    *,
    dot: str,
    fp8: bool,
    split: bool,
    tile: Tile,
    fp8_unit: bool = False,
) -> Kernel:
    """Return K4 for some heads, without a window. Queries have the type ``dot``, keys this type or 8 bits.

    fp8_unit: whether the GPU converts 8-bit numbers itself.
    """
    query = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dot]
    cache = "*u8" if fp8 else query
    types = (
        *_ARENA, "*i32", "i32", "i32", "i32", query, cache, cache, "*fp32", "*fp32", query, query, "*fp32",
        "fp32", "fp32", *("i32",) * 4,
    )  # fmt: skip
    sizes = {
        "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "BLOCK_DIM": power_of_two(dim),
        "BLOCK_VALUE": power_of_two(value_dim),
    }  # fmt: skip
    options = {
        "WINDOW": 0,
        "CHUNKED": False,
        "SOFTCAP": False,
        "SINKS": False,
        "SPLIT": split,
        "FP8": fp8,
        "FP8_UNIT": fp8_unit,
        "DOT": dot,
    }
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "VALUE_DIM": value_dim}
    return Kernel("attention", types, {**shape, **options, **sizes}, "attend", tile.options)


def _attend(fp8: bool) -> Kernel:
    return attend_kernel(14, 2, 64, 64, dot="bfloat16", fp8=fp8, split=True, tile=Tile.of(7, 64, "bfloat16"))


KERNELS: Mapping[str, Kernel] = {
    "apply_runs": Kernel("rows", (*_ROWS, "i32"), {"BLOCK": 256}),
    "prepare_step": Kernel(
        "prepare",
        (*_ROWS, "*i32", *("i32",) * 6, _STEP, "i32", "i32", "i32"),
        {"G": 2, "WIDTH": 4, "BLOCK": 128},
    ),
    "gather_tables": Kernel("rows", (*_ARENA, "*i32", "i32", "i32", "i32", "i32", "*i32", "*i32"), {"BLOCK": 128}),
    "write_keys": _write_keys("*bf16", fp8=False),
    "write_keys, fp8": _write_keys("*u8", fp8=True),
    "attend": _attend(fp8=False),
    "attend, fp8": _attend(fp8=True),
    "merge_splits": Kernel(
        "attention", ("*i32", "*fp32", "*bf16", "i32"), {"HEADS": 14, "VALUE_DIM": 64, "BLOCK_VALUE": 64}
    ),
    "shrink": Kernel(
        "adapters", ("*i32", "*i32", "*bf16", "*bf16", "*fp32", *("i32",) * 4), {"BLOCK_RANK": 16, "BLOCK": 128}
    ),
    "expand": Kernel(
        "adapters", ("*i32", "*i32", "*fp32", "*bf16", "*bf16", *("i32",) * 3), {"BLOCK_RANK": 16, "BLOCK": 64}
    ),
    "penalize": Kernel(
        "sampling", (*_ROWS, *("i32",) * 3, "*i32", "*i32", "*i32", "*fp32", "*i32", "i32", "i32"), {"BLOCK": 1024}
    ),
    "draw_tokens": Kernel(
        "sampling", ("*i32", "i32", "i32", "*i32", "*i64", "*i64", "*fp32", "*i32", "i32"), {"BLOCK": 1024}
    ),
    "verify_drafts": Kernel(
        "sampling", (*_ARENA, "i32", "i32", "*i32", "*i32", "*i32"), {"WIDTH": 4, "BLOCK": 128}
    ),
    "commit_samples": Kernel("rows", (*_ROWS, "*i32", *("i32",) * 3), {"WIDTH": 4, "BLOCK": 128}),
}  # fmt: skip


def load(name: str) -> Any:
    """Return the kernel as the object that Triton launches and compiles."""
    return function_of(KERNELS[name], name)


def function_of(kernel: Kernel, name: str) -> Any:
    """Return the function of the kernel that is listed under this name."""
    return getattr(import_module(f"foreword.device.kernels.{kernel.module}"), kernel.function or name)


def constants_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants with Triton's types in place of their names."""
    import triton.language as tl

    return {name: getattr(tl, value) if isinstance(value, str) else value for name, value in values.items()}
