"""The kernels as the compilers of GPUs see them, on a machine without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

TOOL = Path(__file__).parents[2] / "tools" / "device_table.py"


SPILL_FIRST = [
    "phi-3, bfloat16, fp8, split, sm_90",
    "gemma-3, bfloat16, split, sm_80",
    "gemma-4, float32, split, sm_80",
    "deepseek, float32, sm_90",
    "128 heads of one key, bfloat16, split, sm_80",
]


def tool(folder: Path, *arguments: str) -> str:
    """The output of the tool, which must succeed.

    In a process of its own: kernels that were imported for the interpreter cannot be compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, TOOL, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_compiles_for_every_target_without_spills(tmp_path):
    tool(tmp_path, "--check")


def test_attention_of_the_shapes_that_spill_first_has_no_spills(tmp_path):
    """The largest heads, heads of no power of two, and most heads of one key; `make device` compiles other shapes."""
    found = tool(tmp_path, "--models", *SPILL_FIRST)
    assert [line.rsplit(maxsplit=3)[0] for line in found.splitlines()] == SPILL_FIRST


def test_a_kernel_that_spills_is_found(tmp_path):
    """A tile that is too large makes the attention spill."""
    command = [
        sys.executable, "-c",
        "import sys; sys.path.insert(0, sys.argv[1]); import device_table as t; tile = t.Tile(64, 64, 4);"
        "kernel = t.attend_kernel(32, 8, 256, 256, dot='bfloat16', fp8=False, split=True, tile=tile);"
        "print(t.counts('attend', kernel, t.TARGETS['sm_80']))",
        str(TOOL.parent),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    spilled = int(re.search(r"spilled=(\d+)", done.stdout).group(1))
    assert spilled > 0, done.stdout
