"""Read a trace: line by line, or as a whole. Each error names the file and the line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from foreword.errors import ForewordError, PlanError, reason_of
from foreword.jsonfile import parse_object
from foreword.trace.encoding import LineParser
from foreword.trace.events import Event
from foreword.trace.header import TraceHeader

MAX_LINE = 1 << 28
"""The longest line that is read, in bytes."""


def opened(path: Path, mode: str) -> BinaryIO:
    """Open a trace, compressed with gzip if its name ends with ".gz"."""
    return cast(BinaryIO, gzip.open(path, mode, compresslevel=6) if path.suffix == ".gz" else path.open(mode))


class TraceReader:
    """Reads the events of a file one by one, with the memory of one line. Several passes are possible.

        reader = TraceReader("steps.jsonl.gz")
        for event in reader: ...

    header: the first line. At a line that breaks the format, is cut or cannot be read, the iteration raises a PlanError
    with the number of the line; the events before it are valid.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = next(self._lines(), None)
        if first is None:
            raise PlanError(f"{path}: the trace is empty; its first line must be a header")
        where = self._where(first[0])
        line = parse_object(first[1], where, PlanError)
        try:
            self.header = TraceHeader.from_json(line)
        except KeyError as error:
            raise PlanError(f"{where}: the key {error} is missing") from error
        except ForewordError as error:
            raise PlanError(f"{where}: {error}") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"{where}: is not a header ({error})") from error

    def __iter__(self) -> Iterator[Event]:
        lines, parser = self._lines(), LineParser(self.header)
        next(lines)
        for number, line in lines:
            where = self._where(number)
            value = parse_object(line, where if line.endswith(b"\n") else f"{where} (the last, perhaps cut)", PlanError)
            try:
                event = parser.event(value, number)
            except ForewordError as error:
                raise PlanError(f"{where}: {error}") from error
            yield event

    def num_lines(self) -> int:
        """Count the lines that can be read, in one pass."""
        count = 0
        try:
            for _ in self._lines():
                count += 1
        except PlanError:
            pass
        return count

    def _where(self, number: int) -> str:
        return f"{self.path}, line {number}"

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, line with its end) of each line that is not empty."""
        number = 0
        try:
            with opened(self.path, "rb") as file:
                while line := file.readline(MAX_LINE + 1):
                    number += 1
                    if len(line) > MAX_LINE:
                        raise PlanError(f"{self._where(number)}: is longer than {MAX_LINE} bytes")
                    if line.strip():
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as fault:
            raise PlanError(
                f"{self._where(number + 1)}: the compressed file is cut or damaged here ({fault})"
            ) from fault
        except (OSError, ValueError) as fault:  # ValueError: a null byte in the name
            raise PlanError(
                f"{self.path}: cannot be read ({reason_of(fault)}). Check the path and its permissions"
            ) from fault


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A trace in memory. damage: the error of the first line that cannot be read; the events end before it."""

    header: TraceHeader
    events: Sequence[Event]
    damage: PlanError | None = None

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Return the part of a file that can be read. Raise PlanError if the first line cannot be read."""
        reader, events = TraceReader(path), list[Event]()
        try:
            for event in reader:
                events.append(event)
        except PlanError as damage:
            return cls(reader.header, events, damage)
        return cls(reader.header, events)
