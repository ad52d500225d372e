"""The destination of a trace, as users write it: FILE, or FILE:SIZE."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from foreword.settings import bytes_of

LEAST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Destination:
    """The file of a trace, and the limit of its size together with the part before it; None: no limit."""

    path: Path
    max_bytes: int | None = None

    @classmethod
    def of(cls, given: object) -> Destination:
        """Return the destination of "FILE" or "FILE:SIZE". Raise ValueError with the reason for anything else."""
        text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if not isinstance(text, str):
            raise ValueError("expected the name of a file")
        name, colon, size = text.rpartition(":")
        try:
            path, max_bytes = (Path(name), bytes_of(size)) if colon else (Path(text), None)
        except ValueError:
            raise ValueError(f"{size!r:.40} is not a size: give FILE, or FILE:SIZE such as steps.jsonl:100MB") from None
        if not path.name or "\0" in text:
            raise ValueError("expected the name of a file")
        if max_bytes is not None and max_bytes < LEAST_BYTES:
            raise ValueError(f"the size must be at least {LEAST_BYTES} bytes")
        return cls(path, max_bytes)

    def numbered(self, number: int) -> Destination:
        """Return the destination of one of several processes: for number 2, "steps.jsonl" becomes "steps.2.jsonl"."""
        stem, *suffixes = self.path.name.split(".")
        return Destination(self.path.with_name(".".join([stem, str(number), *suffixes])), self.max_bytes)

    def __str__(self) -> str:
        return str(self.path) if self.max_bytes is None else f"{self.path}:{self.max_bytes}"


def checked_destination(given: object) -> str:
    """Return "FILE" or "FILE:SIZE" as it was given. Raise ValueError with the reason for anything else."""
    Destination.of(given)
    return str(given)
