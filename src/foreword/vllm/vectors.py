"""Launches of vLLM's kernels with what its own Triton kernels made of them: unit tests for any implementation.

The file ``vectors.jsonl`` has a launch per line: ``kernel``, ``grid``, ``arguments``, and in ``results`` the arrays
that differ afterwards. An array is ``{"dtype", "shape", "values"}``; the values of floats are their bits as unsigned
integers. A table of addresses is ``{"pointers": […]}``, of arrays or null; ``name.0`` is a result in its first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from foreword.arrays import AnyArray

FILE = Path(__file__).with_name("vectors.jsonl")


@dataclass(frozen=True, slots=True)
class Pointers:
    """Arrays whose addresses a kernel gets as uint64; 0 for None."""

    arrays: tuple[AnyArray | None, ...]

    def __init__(self, arrays: list[AnyArray | None] | tuple[AnyArray | None, ...]) -> None:
        object.__setattr__(self, "arrays", tuple(arrays))

    def copy(self) -> Pointers:
        return Pointers([None if array is None else array.copy() for array in self.arrays])

    def addresses(self) -> AnyArray:
        return np.array([0 if array is None else array.ctypes.data for array in self.arrays], np.uint64)


Argument: TypeAlias = AnyArray | Pointers | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Vector:
    """A launch and its results. kernel: vLLM's full name. results: the arrays that the kernel changed, by argument."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    results: Mapping[str, AnyArray]

    def differences(self, function: Callable[..., None]) -> list[str]:
        """Call ``function(grid, **arguments)`` on a copy of the arguments; return what differs, bit by bit.

        Arrays that are not among the results must not change.
        """
        return [
            f"{self.kernel}: {name}[{', '.join(map(str, index))}]: expected {expected[index]}, got {got[index]}"
            for name, got in after(self.arguments, lambda arguments: function(self.grid, **arguments)).items()
            for expected in (self.results.get(name, memory_of(self.arguments)[name]),)
            for index in zip(*np.nonzero(_bits(expected) != _bits(got)), strict=True)
        ]


def memory_of(arguments: Mapping[str, Argument]) -> dict[str, AnyArray]:
    """Return the arrays of arguments, also those behind addresses, by argument."""
    found = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for name, value in arguments.items():
        if isinstance(value, Pointers):
            found |= {f"{name}.{i}": array for i, array in enumerate(value.arrays) if array is not None}
    return found


def after(
    arguments: Mapping[str, Argument], launch: Callable[[dict[str, AnyArray | int | float | None]], None]
) -> dict[str, AnyArray]:
    """Call ``launch`` with a copy of the arguments, tables as addresses; return its arrays afterwards."""
    copies = {n: v.copy() if isinstance(v, np.ndarray | Pointers) else v for n, v in arguments.items()}
    launch({name: value.addresses() if isinstance(value, Pointers) else value for name, value in copies.items()})
    return memory_of(copies)


def _bits(array: AnyArray) -> AnyArray:
    return array.view(f"u{array.itemsize}") if array.dtype.kind in "fb" else array


def write_line(vector: Vector) -> str:
    """Return a launch as a line of the file."""
    fields = {
        "kernel": vector.kernel,
        "grid": vector.grid,
        "arguments": {name: _written(value) for name, value in vector.arguments.items()},
        "results": {name: _written(array) for name, array in vector.results.items()},
    }
    return json.dumps(fields, separators=(",", ":"))


def _written(value: Argument) -> object:
    if isinstance(value, Pointers):
        return {"pointers": [_written(array) for array in value.arrays]}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": value.shape, "values": _bits(value).reshape(-1).tolist()}
    return value


def _read(value: object) -> Argument:
    match value:
        case {"pointers": list(arrays)}:
            tables = [_read(array) for array in arrays]
            return Pointers([table if isinstance(table, np.ndarray) else None for table in tables])
        case {"dtype": str(name), "shape": list(shape), "values": list(values)}:
            dtype = np.dtype(name)
            stored = f"u{dtype.itemsize}" if dtype.kind in "fb" else dtype
            array: AnyArray = np.array(values, stored).view(dtype).reshape(shape)
            return array
        case None | bool() | int() | float():
            return value
    raise ValueError(f"a vector has an argument that is neither an array nor a number: {value!r}")


def golden_vectors(file: Path = FILE) -> Iterator[Vector]:
    """Yield the launches of a file, by default those that come with the package."""
    for line in file.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        results = {name: _read(array) for name, array in fields["results"].items()}
        yield Vector(
            fields["kernel"],
            tuple(fields["grid"]),
            {name: _read(value) for name, value in fields["arguments"].items()},
            {name: array for name, array in results.items() if isinstance(array, np.ndarray)},
        )
