"""Keep the last steps of an engine in memory, and write them as a trace when a step fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from foreword.trace.capture import Captured, Filled
from foreword.trace.header import TraceHeader

MAX_BYTES = 16 << 20
"""Limit of the memory of half of the ring, in addition to the tokens in progress. When it is exceeded, the other half
begins."""


class Place(NamedTuple):
    """A place in what a ring keeps: the number of a half, and the number of its values before the place."""

    half: int
    offset: int


class Recent(NamedTuple):
    """The events that a ring kept since a place.

    snapshot: the requests in progress before the events, if these do not continue at the place; else None. first_step:
    the number of the first step after the snapshot. place: the end of the events.
    """

    snapshot: list[Filled] | None
    first_step: int
    captured: list[Captured]
    place: Place


class FlightRing:
    """Keeps at least the last ``num_steps`` steps, and less than twice as many.

    It has two halves, which each begin with a snapshot of the requests in progress: the older one is dropped when the
    newer one is full.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._older: _Half | None = None
        self._newer = _Half([], 1, 0)

    @property
    def wants_snapshot(self) -> bool:
        """Return whether the next step begins a new half: call `begin` first."""
        return self._newer.num_steps >= self._num_steps or self._newer.nbytes > MAX_BYTES

    def begin(self, snapshot: list[Filled], step: int, *, forgets: bool = False) -> None:
        """Begin a new half with the requests in progress before a step of this number. forgets: drop all before it."""
        self._older = None if forgets else self._newer
        self._newer = _Half(snapshot, step, self._newer.number + 1)

    @property
    def num_left(self) -> int:
        """Return the number of steps without memory that can be added until `wants_snapshot`."""
        return 0 if self.wants_snapshot else self._num_steps - self._newer.num_steps

    def add(self, captured: Sequence[Captured], nbytes: int, num_steps: int) -> None:
        """Keep the values that a `Capture` collected since the last call. nbytes: their memory. num_steps: the number
        of steps among them.
        """
        half = self._newer
        half.captured += captured
        half.num_steps += num_steps
        half.nbytes += nbytes

    def since(self, place: Place | None) -> Recent:
        """Return the values since a place; all values if the place is None or was dropped."""
        halves = [self._newer] if self._older is None else [self._older, self._newer]
        follows = place is not None and place.half >= halves[0].number
        if place is not None and follows:
            halves = halves[place.half - halves[0].number :]
        skipped = place.offset if place is not None and follows else 0
        captured = [*halves[0].captured[skipped:], *(value for half in halves[1:] for value in half.captured)]
        end = Place(self._newer.number, len(self._newer.captured))
        return Recent(None if follows else halves[0].snapshot, halves[0].first_step, captured, end)

    def write(self, path: Path, header: TraceHeader) -> int:
        """Write the steps as a trace, and return their number. Raise OSError if it cannot be written."""
        from foreword.trace.recorder import Encoder  # here: most engines never write one
        from foreword.trace.writer import TraceWriter

        first, encoder = self._older or self._newer, Encoder(len(header.kv_groups))
        halves = [self._newer] if self._older is None else [self._older, self._newer]
        with TraceWriter(path, header.beginning_at(first.first_step)) as writer:
            for request in encoder.live(first.snapshot):
                writer.write(request)
            for half in halves:
                for event in encoder.events(half.captured):
                    writer.write(event)
        return sum(half.num_steps for half in halves)


class _Half:
    __slots__ = ("captured", "first_step", "nbytes", "num_steps", "number", "snapshot")

    def __init__(self, snapshot: list[Filled], first_step: int, number: int) -> None:
        self.snapshot, self.first_step, self.number = snapshot, first_step, number
        self.captured: list[Captured] = []
        self.num_steps = self.nbytes = 0
