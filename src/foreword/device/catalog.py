"""The kernels by name, and the types that they are compiled for ahead of time.

Callers launch kernels by name, so that they import no Triton: a device does, when it launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A kernel of ``foreword.device.kernels.<module>``.

    types: of its arguments, in order, as Triton writes them ("*i32": a pointer). constants: the sizes that a table of
    compiled kernels shows it with, by name; a type is written as its name.
    """

    module: str
    types: tuple[str, ...]
    constants: Mapping[str, Any]


_ARENA = ("*i32", "*i32")  # arena, packet
_CACHE = ("*bf16", "*bf16", "*fp32", "*fp32")  # keys, values, scales of both
_ATTENTION = {"HEADS": 14, "KV_HEADS": 2, "DIM": 64, "VALUE_DIM": 64}
_ATTEND = {
    "WINDOW": 0,
    "SOFTCAP": False,
    "SINKS": False,
    "FP8": False,
    "BLOCK_N": 32,
    "BLOCK_DIM": 64,
    "BLOCK_VALUE": 64,
}

KERNELS: Mapping[str, Kernel] = {
    "apply_runs": Kernel("rows", _ARENA, {"BLOCK": 256}),
    "prepare_step": Kernel(
        "prepare",
        (*_ARENA, "*i32", *("i32",) * 7, "*i32", "*i64", "*i32", "*i32", "*i64", "*i64", "*i32", "*i32", "*i1",
         "*i32", "*i32", "*i32", "*i32", "*i64", "*i32", "*i32", "i32", "i32", "i32"),
        {"G": 2, "WIDTH": 4, "BLOCK": 128},
    ),
    "gather_tables": Kernel("rows", (*_ARENA, "*i32", "i32", "i32", "i32", "i32", "*i32", "*i32"), {"BLOCK": 128}),
    "write_keys": Kernel(
        "keys",
        ("*i32", "*bf16", "*bf16", *_CACHE, "*i64", "*i64", "*fp32", "*fp32", "*bf16", "*bf16", "fp32", *("i32",) * 5),
        {**_ATTENTION, "PAIRS": 32, "NORM": True, "FP8": False, "BLOCK_DIM": 64},
    ),
    "attend": Kernel(
        "attention",
        (*_ARENA, "*i32", "i32", "i32", "i32", "*bf16", *_CACHE, "*bf16", "*bf16", "*fp32", "fp32", "fp32",
         *("i32",) * 4),
        {**_ATTENTION, **_ATTEND, "SPLIT": True, "DOT": "bfloat16", "BLOCK_M": 16},
    ),
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
        "sampling", (*_ARENA, *("i32",) * 4, "*i32", "*i32", "*i32", "*fp32", "*i32", "i32"), {"BLOCK": 1024}
    ),
    "draw_tokens": Kernel(
        "sampling", ("*i32", "i32", "i32", "*i32", "*i64", "*i64", "*fp32", "*i32", "i32"), {"BLOCK": 1024}
    ),
    "verify_drafts": Kernel(
        "sampling", (*_ARENA, "i32", "i32", "*i32", "*i32", "*i32"), {"WIDTH": 4, "BLOCK": 128}
    ),
    "commit_samples": Kernel("rows", (*_ARENA, "*i32", *("i32",) * 4), {"WIDTH": 4, "BLOCK": 128}),
}  # fmt: skip


def load(name: str) -> Any:
    """The kernel, as Triton launches and compiles it."""
    return getattr(import_module(f"foreword.device.kernels.{KERNELS[name].module}"), name)


def constants_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constants with Triton's types in place of their names."""
    import triton.language as tl

    return {name: getattr(tl, value) if isinstance(value, str) else value for name, value in values.items()}
