"""The parts of a lesson."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Table = Callable[[int | None], str]
"""Makes a table of this width, in characters; None: without a limit."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A part of a real step. table: for terminals, and on pages below the picture. picture: SVG, for pages."""

    caption: str
    table: Table
    picture: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of Python that run as they stand."""

    source: str


@dataclass(frozen=True, slots=True)
class Exercise:
    """The part of an exercise that the reader changes. task: in words.

    start: a file to begin with. solution: a file with a right answer. hint: a hint. fault: takes the names that the
    reader's file defines, and describes what is wrong with them; "" if nothing is. Raise KeyError for a missing name.
    """

    task: str
    start: str
    hint: str
    solution: str
    fault: Callable[[dict[str, object]], str]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson. name: of its page."""

    name: str
    title: str
    parts: tuple[str | Shown | Code, ...]
    exercise: Exercise


def function_fault(name: str, cases: Callable[[], list[tuple[tuple[object, ...], object]]]) -> Callable[..., str]:
    """Return the `Exercise.fault` of a function: the first case that it answers wrongly.

    cases: yields (arguments, right answer). A sequence or array is right if its elements are those of the answer.
    """

    def fault(names: dict[str, object]) -> str:
        function = names[name]
        if not callable(function):
            return f"{name} is not a function"
        for arguments, right in cases():
            got = function(*arguments)
            if plain(got) != right:
                given = ", ".join(map(repr, arguments))
                return f"{name}({given}) returned {plain(got)!r}; the right answer is {right!r}"
        return ""

    return fault


def plain(value: object) -> object:
    """Return a value with lists in place of tuples and arrays, and Python's numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
