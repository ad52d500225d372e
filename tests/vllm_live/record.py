"""Record the golden vectors: python record.py DIRECTORY OUT, with the package directory of vLLM 0.33 and the file.

Of random launches of each kernel, a few small ones that notice every mutant of its function that any of them notices.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from interpreted import Sources
from launches import LAUNCHES
from mutations import mutants, noticed

from foreword.vllm.kernels import KERNELS
from foreword.vllm.vectors import Vector, after, memory_of, write_line

SEEDS = range(24)


def launches_of(sources: Sources, name: str) -> list[Vector]:
    """Return random launches of a kernel with their results, the shortest first."""
    found = []
    for seed in SEEDS:
        grid, arguments = LAUNCHES[name.rpartition(".")[2]](np.random.default_rng(seed))
        arguments = {key: value for key, value in arguments.items() if key in sources.kernel(name).arg_names}
        memory = memory_of(arguments)
        results = after(arguments, lambda launched, grid=grid: sources.launch(name, grid, launched))
        changed = {key: array for key, array in results.items() if array.tobytes() != memory[key].tobytes()}
        found.append(Vector(name, grid, arguments, changed))
    return sorted(found, key=lambda vector: len(write_line(vector)))


def chosen(vectors: list[Vector]) -> list[Vector]:
    """Return launches that together notice all mutants that any of them does, one after another the one of most."""
    function = KERNELS[vectors[0].kernel]
    assert [d for vector in vectors for d in vector.differences(function)] == []
    module = import_module(function.__module__)
    seen: list[set[int]] = [set() for _ in vectors]
    for number, mutant in enumerate(mutants(module, Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if mutant.function == function.__name__ or not mutant.function.endswith("_kernel"):
            changed = mutant.functions[function.__name__]
            for vector, numbers in zip(vectors, seen, strict=True):
                if noticed(lambda vector=vector, changed=changed: vector.differences(changed)):
                    numbers.add(number)
    picked, missing = [], set().union(*seen)
    while missing:
        best = max(range(len(vectors)), key=lambda i: len(seen[i] & missing) / len(write_line(vectors[i])) ** 0.5)
        picked.append(vectors[best])
        missing -= seen[best]
    return picked


def main() -> None:
    sources = Sources(Path(sys.argv[1]))
    lines = [write_line(vector) for name in KERNELS for vector in chosen(launches_of(sources, name))]
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
