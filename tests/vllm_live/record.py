"""Record the golden vectors: python record.py DIRECTORY FILE [MODULE …], with the package directory of vLLM 0.33. Of
modules that are not named the file's vectors stay; without names all are recorded.

Of random launches of each kernel, a few small ones that notice every mutant of its function that any of them notices.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import numpy as np
from interpreted import Sources
from launches import LAUNCHES
from mutations import mutants, noticed

from foreword.vllm import inputs, recurrent, sampling, thinking, verification
from foreword.vllm.kernels import KERNELS
from foreword.vllm.vectors import Vector, after, memory_of, write_line

SEEDS = range(48)


def launches_of(sources: Sources, name: str) -> list[Vector]:
    """Return random launches of a kernel with their results, the shortest first."""
    found = []
    for seed in SEEDS:
        grid, arguments = LAUNCHES[KERNELS[name].__name__](np.random.default_rng(seed))
        arguments = {key: value for key, value in arguments.items() if key in sources.kernel(name).arg_names}
        memory = memory_of(arguments)
        results = after(arguments, lambda launched, grid=grid: sources.launch(name, grid, launched))
        changed = {key: array for key, array in results.items() if array.tobytes() != memory[key].tobytes()}
        found.append(Vector(name, grid, arguments, changed))
    return sorted(found, key=lambda vector: len(write_line(vector)))


def chosen(module: ModuleType, launches: dict[str, list[Vector]]) -> list[Vector]:
    """Return launches of a module's kernels that together notice every mutant that any of them notices."""
    noticing: dict[str, dict[int, set[int]]] = {name: defaultdict(set) for name in launches}
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for number, mutant in enumerate(mutants(module, source)):
        for name, vectors in launches.items():
            function = KERNELS[name].__name__
            if mutant.function == function or not mutant.function.endswith("_kernel"):
                for i, vector in enumerate(vectors):
                    if noticed(lambda vector=vector, changed=mutant.functions[function]: vector.differences(changed)):
                        noticing[name][i].add(number)
    return [launches[name][i] for name, seen in noticing.items() for i in covering(launches[name], seen)]


def covering(vectors: list[Vector], seen: dict[int, set[int]]) -> list[int]:
    """Return which launches together notice all of ``seen``: one after another that of most for its size."""
    picked, missing = [], set().union(*seen.values())
    while missing:
        best = max(seen, key=lambda i: len(seen[i] & missing) / len(write_line(vectors[i])) ** 0.5)
        picked.append(best)
        missing -= seen[best]
    return sorted(picked)


def main() -> None:
    sources, file, lines = Sources(Path(sys.argv[1])), Path(sys.argv[2]), []
    for module in (inputs, recurrent, sampling, thinking, verification):
        if sys.argv[3:] and module.__name__.rpartition(".")[2] not in sys.argv[3:]:
            kept = (line for line in file.read_text(encoding="utf-8").splitlines() if line)
            lines += [line for line in kept if KERNELS[json.loads(line)["kernel"]].__module__ == module.__name__]
            continue
        names = [name for name, function in KERNELS.items() if function.__module__ == module.__name__]
        for vector in chosen(module, {name: launches_of(sources, name) for name in names}):
            assert vector.differences(KERNELS[vector.kernel]) == []
            lines.append(write_line(vector))
        print(module.__name__, len(lines), flush=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
