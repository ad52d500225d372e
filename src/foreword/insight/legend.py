"""Explain the tables of `InputBatch.explain`, from the specification of every tensor."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from foreword.batch.proof.spec import SYMBOLS, TENSORS, Level

WIDTH = 120  # characters of a line without a terminal
LABEL = 22
SHOWN_SYMBOLS = ("T", "B", "L", "K", "S", "P", "M")


def legend(names: Iterable[str], width: int | None = None) -> str:
    """Return a description of each named tensor and of the code that reads it, in lines of this width, then the
    symbols.
    """
    return "\n".join(["What the rows are, and → who reads them", *_lines(set(names), width or WIDTH)])


def _lines(names: set[str], width: int) -> Iterator[str]:
    for spec in TENSORS:
        if spec.name in names and spec.level is not Level.SYSTEM:
            yield from _entry(spec.name, f"{spec.definition} → {spec.consumers}", width)
    for symbol in SHOWN_SYMBOLS:
        yield from _entry(symbol, SYMBOLS[symbol], width)


def _entry(name: str, text: str, width: int) -> list[str]:
    indent = " " * (2 + LABEL)
    first = f"  {name:<{LABEL}}"
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
