"""The functions of `foreword.vllm` against the kernels of the installed vLLM in Triton's interpreter, bit by bit."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from foreword.native import available
from foreword.vllm import sampling, verification
from foreword.vllm.kernels import KERNELS, check_arguments
from foreword.vllm.vectors import Vector, after, golden_vectors

if find_spec("vllm") is None or "TRITON_DIRECTORY" not in os.environ:
    pytest.skip("needs vLLM and Triton: `make vllm`", allow_module_level=True)

from interpreted import Sources
from launches import LAUNCHES
from mutations import mutants, noticed

SOURCES = Sources(Path(os.environ.get("VLLM_SOURCES") or str(find_spec("vllm").origin)).parent)
"""Of the installed version; VLLM_SOURCES is the `__init__.py` of another one."""

SEEDS = range(1000, 1040)  # not those of the golden vectors


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_function_gives_the_bits_of_vllms_kernel_on_random_launches(kernel, monkeypatch):
    names = SOURCES.kernel(kernel).arg_names
    check_arguments(kernel, names)
    for seed in SEEDS:
        grid, arguments = LAUNCHES[KERNELS[kernel].__name__](np.random.default_rng(seed))
        arguments = {name: value for name, value in arguments.items() if name in names}
        results = after(arguments, lambda launched, grid=grid: SOURCES.launch(kernel, grid, launched))
        for is_native in (available(), False):
            for module in (sampling, verification):
                monkeypatch.setattr(module, "available", lambda is_native=is_native: is_native)
            differences = Vector(kernel, grid, arguments, results).differences(KERNELS[kernel])
            assert differences == [], f"seed {seed}, native code: {is_native}"


@pytest.mark.parametrize("name", ["inputs", "recurrent", "sampling", "thinking", "verification"])
def test_the_golden_vectors_notice_small_changes_of_the_functions(name):
    module = import_module(f"foreword.vllm.{name}")
    vectors = [vector for vector in golden_vectors() if KERNELS[vector.kernel].__module__ == module.__name__]
    missed, count = [], 0
    for mutant in mutants(module, Path(module.__file__).read_text(encoding="utf-8")):
        count += 1
        own = [v for v in vectors if KERNELS[v.kernel].__name__ == mutant.function] or vectors
        if not any(
            noticed(lambda v=v, mutant=mutant: v.differences(mutant.functions[KERNELS[v.kernel].__name__])) for v in own
        ):
            missed.append(f"{mutant.function}: {mutant.change}")
    assert len(missed) <= count * 0.15, missed  # most of them have no effect, as a longer slice of a full array
