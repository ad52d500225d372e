"""Arrivals of a real service: when, how many tokens in and out, and which prompts begin alike."""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import I32
from foreword.errors import ConfigError

HASHED_TOKENS = 512  # tokens per hash id of a trace
_HALF = 2**30  # token ids below this represent hash ids, those from here on requests


@dataclass(frozen=True, slots=True)
class Arrival:
    """time: seconds since the trace began. hash_ids: equal ids at equal places mean equal prompt beginnings."""

    time: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    def prompt(self, index: int) -> I32:
        """Token ids that begin alike where the trace says so; past its hash ids unique to the request (``index``)."""
        tokens = np.full(self.input_length, _HALF + index % (_HALF - 1), np.int32)
        alike = np.repeat(np.array([h % _HALF for h in self.hash_ids], np.int32), HASHED_TOKENS)[: len(tokens)]
        tokens[: len(alike)] = alike
        return tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory, in the order of time."""

    arrivals: tuple[Arrival, ...]

    @property
    def has_prefixes(self) -> bool:
        return any(a.hash_ids for a in self.arrivals)

    @property
    def max_length(self) -> int:
        """Tokens of its longest request."""
        return max(a.input_length + a.output_length for a in self.arrivals)

    def requests(self, num_requests: int, *, speed: float = 1.0) -> Iterator[Arrival]:
        """``num_requests`` arrivals, ``speed`` times as fast; the trace is repeated as often as needed, with
        prompts of its own each time. ConfigError for a speed that is not above 0.
        """
        if not 0 < speed < math.inf:
            raise ConfigError(f"speed={speed}: must be above 0; 1 is the trace's own")
        period = self.arrivals[-1].time + 1e-3
        stride = 1 + max((max(a.hash_ids) for a in self.arrivals if a.hash_ids), default=0)
        left = num_requests
        for turn in count():
            for a in self.arrivals[:left]:
                ids = tuple(h + turn * stride for h in a.hash_ids) if turn else a.hash_ids
                yield Arrival((a.time + turn * period) / speed, a.input_length, a.output_length, ids)
            left -= len(self.arrivals)
            if left <= 0:
                return


def read_trace(path: str | Path) -> Trace:
    """A .csv with TIMESTAMP, ContextTokens, GeneratedTokens, or a .jsonl with timestamp (ms), input_length,
    output_length, hash_ids (may be absent). Empty lines are skipped; a length of 0 counts as 1. ConfigError, naming the
    line, for anything else.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            arrivals = list(_arrivals(path, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None
    if not arrivals:
        raise ConfigError(f"trace {path}: no requests")
    if path.suffix == ".csv":  # dates; microseconds are what they have
        first = min(a.time for a in arrivals)
        arrivals = [replace(a, time=round(a.time - first, 6)) for a in arrivals]
    arrivals.sort(key=lambda a: a.time)
    return Trace(tuple(arrivals))


def _arrivals(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    if path.suffix == ".csv":
        table = csv.DictReader(lines)
        rows: Iterator[tuple[int, Any]] = ((table.line_num, row) for row in table)
        read: Callable[[Any], Arrival] = _from_csv
    else:
        rows = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        read = _from_json
    for number, row in rows:
        try:
            arrival = read(row)
            if arrival.input_length < 0 or arrival.output_length < 0 or not math.isfinite(arrival.time):
                raise ValueError("a length below 0, or a time that is not a number")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"trace {path}, line {number}: {error!r}; see foreword.scheduler.simulation.read_trace for the format"
            ) from None
        yield replace(arrival, input_length=max(arrival.input_length, 1), output_length=max(arrival.output_length, 1))


def _from_csv(row: Mapping[str, str]) -> Arrival:
    moment = datetime.fromisoformat(row["TIMESTAMP"])
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _from_json(line: str) -> Arrival:
    row = json.loads(line)
    seconds, lengths = row["timestamp"] / 1000, (int(row["input_length"]), int(row["output_length"]))
    return Arrival(seconds, *lengths, tuple(map(operator.index, row.get("hash_ids") or ())))
