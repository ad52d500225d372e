"""The kernels as the compilers of GPUs see them, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

TOOL = Path(__file__).parents[2] / "tools" / "device_table.py"


def test_every_kernel_compiles_for_every_target_without_spills(tmp_path):
    """In a process of its own: kernels that were imported for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, TOOL, "--check"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
