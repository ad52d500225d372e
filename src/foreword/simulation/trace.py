"""Read the arrivals of a real service: times, numbers of input and output tokens, and prompts with equal beginnings."""

from __future__ import annotations

import csv
import io
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import merge
from itertools import count, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import I32
from foreword.errors import ConfigError
from foreword.integers import INT32_MAX
from foreword.jsonfile import parse_object, read_bytes

HASHED_TOKENS = 512  # tokens per hash id of a trace
MAX_COPIES = 100_000
MAX_TIME = 1e10  # seconds of a trace: 300 years
_HALF = 2**30  # token ids below this represent hash ids, those from here on requests


@dataclass(slots=True)
class Arrival:
    """time: seconds since the trace began. hash_ids: equal ids at equal places mean equal beginnings.

    num_hashed: the number of tokens that the ids represent, if it includes tokens of the answer; None: those of the
    prompt.
    is_measured: whether its latencies count. streams: whether its tokens are awaited one by one. Treat arrivals as
    immutable; the class is not frozen, for speed.
    """

    time: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    num_hashed: int | None = None
    is_measured: bool = True
    streams: bool = True

    def names(self, index: int, length: int, end: int, size: int, hashed_tokens: int = HASHED_TOKENS) -> I32:
        """Return the names of the pieces of its first ``length`` tokens and of the answer up to ``end``: int32
        [ceil(end / size)]. A piece has ``size`` tokens, a divisor of ``hashed_tokens``, the tokens of an id. Pieces
        that the trace describes as equal have equal names. All other pieces have names that only this request
        (``index``) has.
        """
        names = np.empty(-(-end // size), np.int32)
        names.fill(_HALF + index % (_HALF - 1))
        if self.hash_ids:
            known = length if self.num_hashed is None else min(self.num_hashed, end)
            ids = np.array([h % _HALF for h in self.hash_ids[: -(-known // hashed_tokens)]], np.int32)
            alike = ids.repeat(hashed_tokens // size)[: known // size]
            names[: len(alike)] = alike
        return names


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory, in the order of time. hashed_tokens: the number of tokens that one hash id represents."""

    arrivals: tuple[Arrival, ...]
    hashed_tokens: int = HASHED_TOKENS

    @property
    def max_length(self) -> int:
        """Return the number of tokens of its longest request."""
        return max(a.input_length + a.output_length for a in self.arrivals)

    def requests(self, num_requests: int, *, speed: float = 1.0, copies: int = 1) -> Load:
        """Return ``num_requests`` arrivals, ``speed`` times as fast. The trace is repeated as often as needed, each
        time with new prompts. copies: the number of copies of the trace that run at the same time, each with its own
        prompts and from another place of the trace on. Raise ConfigError for a speed outside [1e-6, 1e6] or copies
        outside [1, 1e5].
        """
        if not 1e-6 <= speed <= 1e6:
            raise ConfigError(f"speed={speed}: must be in [1e-6, 1e6]; 1 is the trace's own")
        if not 1 <= copies <= MAX_COPIES:
            raise ConfigError(f"copies={copies}: must be in [1, {MAX_COPIES}]")
        return Load(self, num_requests, speed, copies)


@dataclass(frozen=True, slots=True)
class Load:
    """The arrivals of `Trace.requests`, which may be iterated over any number of times."""

    trace: Trace
    num_requests: int
    speed: float
    copies: int

    def __iter__(self) -> Iterator[Arrival]:
        largest = max((max(a.hash_ids) for a in self.trace.arrivals if a.hash_ids), default=0)
        copies = [self._copy(number, 1 + largest) for number in range(self.copies)]
        return islice(merge(*copies, key=attrgetter("time")) if len(copies) > 1 else copies[0], self.num_requests)

    def _copy(self, number: int, stride: int) -> Iterator[Arrival]:
        """Yield the arrivals of a copy without end."""
        arrivals, speed = self.trace.arrivals, self.speed
        period = arrivals[-1].time + 1e-3
        first = len(arrivals) * number // self.copies
        for turn in count():
            shift = stride * (turn * self.copies + number)
            begin = turn * period - arrivals[first].time if number else turn * period
            for a in arrivals[0 if turn else first :]:
                ids = tuple([h + shift for h in a.hash_ids]) if shift else a.hash_ids
                time = (a.time + begin) / speed
                yield Arrival(time, a.input_length, a.output_length, ids, a.num_hashed, a.is_measured, a.streams)


FORMAT = "docs/simulation.md has the fields of .csv and .jsonl files"


def read_trace(path: str | Path) -> Trace:
    """Read a .csv file with TIMESTAMP, ContextTokens and GeneratedTokens, or a .jsonl file with timestamp (ms),
    input_length, output_length and optionally hash_ids and stream. Empty lines are skipped, and a length of 0 counts as
    1. Any other content raises a ConfigError that names the line.
    """
    path = Path(path)
    try:
        arrivals = list(_arrivals(path, read_bytes(path, ConfigError)))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None
    if not arrivals:
        raise ConfigError(f"trace {path}: no requests")
    if path.suffix == ".csv":  # dates, which have a resolution of microseconds
        first = min(a.time for a in arrivals)
        arrivals = [replace(a, time=round(a.time - first, 6)) for a in arrivals]
    arrivals.sort(key=lambda a: a.time)
    return Trace(tuple(arrivals))


def _arrivals(path: Path, data: bytes) -> Iterator[Arrival]:
    rows: Iterator[tuple[int, Any]]
    if path.suffix == ".csv":
        table = csv.DictReader(io.StringIO(data.decode("utf-8"), newline=""))
        rows, read = ((table.line_num, row) for row in table), _from_csv
    else:
        lines = ((number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip())
        rows, read = ((n, parse_object(line, f"trace {path}, line {n}", ConfigError)) for n, line in lines), _from_json
    for number, row in rows:
        try:
            yield read(row)
        except KeyError as error:
            raise ConfigError(f"trace {path}, line {number}: {error} is missing; {FORMAT}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"trace {path}, line {number}: {error}; {FORMAT}") from None


def _from_csv(row: Mapping[str, str]) -> Arrival:
    moment = datetime.fromisoformat(row["TIMESTAMP"])
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return Arrival(seconds, _length(row["ContextTokens"]), _length(row["GeneratedTokens"]))


def _from_json(row: Mapping[str, Any]) -> Arrival:
    seconds, ids = row["timestamp"] / 1000, tuple(map(operator.index, row.get("hash_ids") or ()))
    if not 0 <= seconds <= MAX_TIME:
        raise ValueError(f"timestamp: must be in [0, {1000 * MAX_TIME:g}] ms")
    streams = row.get("stream", True)
    if not isinstance(streams, bool):
        raise ValueError("stream: must be true or false")
    return Arrival(seconds, _length(row["input_length"]), _length(row["output_length"]), ids, streams=streams)


def _length(value: Any) -> int:
    length = int(value)
    if not 0 <= length <= INT32_MAX:
        raise ValueError(f"a length must be in [0, {INT32_MAX}]")
    return max(length, 1)
