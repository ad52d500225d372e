"""Find marks in a model's output, such as "<tool_call>", and places where more text may complete a mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.messages.notation import overlap


@dataclass(frozen=True, slots=True)
class Match:
    """A mark in a text, from start to end. captures: the named groups of a pattern."""

    start: int
    end: int
    captures: Mapping[str, str]


class Marker(Protocol):
    """A mark that opens or closes a part of an output."""

    def find(self, text: str, at: int, *, at_end: bool) -> tuple[Match | None, int]:
        """Return the first certain mark from ``at`` on, and the position from which more text may complete a mark.

        at_end: no more text follows.
        """
        ...

    def match(self, text: str, at: int) -> tuple[Match | None, bool]:
        """Return the mark that begins at ``at``, and whether more text may complete a mark there."""
        ...

    def cut(self, text: str, at: int) -> int:
        """Return the beginning, from ``at`` on, of a mark that the end of the text cuts off, or the end of the text if
        there is none.
        """
        ...

    def last_end(self, text: str) -> int | None:
        """Return the position after the last mark in a text."""
        ...


MAX_MARK = 1000  # most characters that are held back because they may become a match
NO_CAPTURES: Mapping[str, str] = {}


class Literals:
    """Any of several texts. If two of them begin at the same place, the longer one is the mark."""

    __slots__ = ("_longest", "_pattern", "_prefixes", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._pattern = re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
        self._longest = max(map(len, texts))
        # Texts that are the beginning of another text are certain only when the next character is known.
        self._prefixes = {a for a in texts if any(b != a and b.startswith(a) for b in texts)}

    def find(self, text: str, at: int, *, at_end: bool) -> tuple[Match | None, int]:
        found = self._pattern.search(text, at)
        match = None if found is None else Match(found.start(), found.end(), NO_CAPTURES)
        if at_end:
            return match, len(text)
        pending = self.cut(text, at)
        if match is not None and match.end == len(text) and text[match.start :] in self._prefixes:
            pending = min(pending, match.start)
        return match, pending

    def match(self, text: str, at: int) -> tuple[Match | None, bool]:
        found = self._pattern.match(text, at)
        if found is not None:
            return Match(at, found.end(), NO_CAPTURES), False
        rest = text[at : at + self._longest]
        return None, any(marker.startswith(rest) for marker in self.texts)

    def cut(self, text: str, at: int) -> int:
        tail = text[max(at, len(text) - self._longest + 1) :]
        return len(text) - max(overlap(tail, marker) for marker in self.texts)

    def last_end(self, text: str) -> int | None:
        ends = [at + len(marker) for marker in self.texts if (at := text.rfind(marker)) >= 0]
        return max(ends, default=None)


class Pattern:
    """A regular expression of the `regex` package, of a model's ``response_template``."""

    __slots__ = ("_pattern",)

    def __init__(self, compiled: Any) -> None:
        self._pattern = compiled

    def find(self, text: str, at: int, *, at_end: bool) -> tuple[Match | None, int]:
        found = self._pattern.search(text, at, partial=not at_end, timeout=1.0)
        if found is None:
            return None, len(text)
        # A match that reaches the end of the text may become longer, and a match of "$" is not certain yet.
        if not at_end and (found.partial or found.end() == len(text)):
            return None, max(found.start(), len(text) - MAX_MARK)
        captures = {name: value for name, value in found.groupdict().items() if value is not None}
        return Match(found.start(), found.end(), captures), len(text)

    def match(self, text: str, at: int) -> tuple[Match | None, bool]:
        found, pending = self.find(text, at, at_end=False)
        return (found if found is not None and found.start == at else None), pending == at

    def cut(self, text: str, at: int) -> int:
        return len(text)  # any text may be a partial match of a pattern

    def last_end(self, text: str) -> int | None:
        ends = [found.end() for found in self._pattern.finditer(text, timeout=1.0)]
        return ends[-1] if ends else None
