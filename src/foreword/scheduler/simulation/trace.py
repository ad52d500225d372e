"""Arrivals of a real service: when, how many tokens in and out, and which prompts begin alike."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError

HASHED_TOKENS = 512  # tokens that one hash id of a trace stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """time: seconds since the trace began. hash_ids: equal ids at equal places mean equal prompt beginnings."""

    time: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """Token ids that begin alike where the trace says so; without hash ids like nobody else's (``index``)."""
        if not self.hash_ids:
            return np.full(self.input_length, index % 2**31, np.int32)
        ids = np.array(self.hash_ids, np.int64) % 2**31
        return np.repeat(ids.astype(np.int32), HASHED_TOKENS)[: self.input_length]


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
        """``num_requests`` arrivals, ``speed`` times as fast; the trace is repeated as often as that takes, with
        prompts of its own each time.
        """
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
    output_length, hash_ids. ConfigError for anything else.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as lines:
            arrivals = list(_from_csv(csv.DictReader(lines)) if path.suffix == ".csv" else map(_from_json, lines))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"trace {path}: {error!r}; see foreword.scheduler.simulation.read_trace for the format"
        ) from None
    if not arrivals:
        raise ConfigError(f"trace {path}: no requests")
    arrivals.sort(key=lambda a: a.time)
    return Trace(tuple(arrivals))


def _from_csv(rows: Iterator[dict[str, str]] | csv.DictReader[str]) -> Iterator[Arrival]:
    start: datetime | None = None
    for row in rows:
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or moment
        lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield Arrival((moment - start).total_seconds(), max(lengths[0], 1), max(lengths[1], 1))


def _from_json(line: str) -> Arrival:
    row = json.loads(line)
    lengths = max(int(row["input_length"]), 1), max(int(row["output_length"]), 1)
    return Arrival(row["timestamp"] / 1000, *lengths, tuple(row["hash_ids"]))
