"""Cut a trace down to the events that still show a fault, by delta debugging over requests, steps and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from foreword.errors import ConfigError, ForewordError
from foreword.trace.compare import first_difference
from foreword.trace.events import Event, Step
from foreword.trace.project import (
    adds_of,
    num_steps,
    requests_of,
    shortened,
    with_requests,
    without_first_step,
    without_last_step,
    without_tensors,
)
from foreword.trace.reader import Trace
from foreword.trace.replay import Replay

T = TypeVar("T")
Failing = Callable[[Trace], int | None]
"""Returns the first step of a trace, counted from 0, that shows the fault; None if no step does."""


def evidence(tensor: str | None = None) -> Failing:
    """Return the test for a difference of the tensor with this name, or of any tensor, from the definition."""

    def failing(trace: Trace) -> int | None:
        replay = Replay(trace.header, max_num_reqs=len(trace.events))
        for event in trace.events:
            batch = replay.apply(event)
            if batch is None or not isinstance(event, Step):
                continue
            for name, value in event.tensors.items():
                if tensor in (None, name) and first_difference(batch, name, value) is not None:
                    return replay.num_steps - 1
        return None

    return failing


class Shrinker:
    """Shrinks one trace. num_tries: the number of runs of the test.

    failing: the test. A part of the trace that cannot be replayed is not given to it.
    """

    def __init__(self, failing: Failing) -> None:
        self._failing = failing
        self.num_tries = 0

    def shrink(self, trace: Trace, *, tensor: str | None = None, keep_tensors: bool = True) -> Trace:
        """Return a small trace that still fails. Raise ConfigError for one that does not fail.

        tensor: the only tensor of the last step that is kept; None: one that shows the fault. keep_tensors: False if
        the test does not read tensors.
        """
        events = list(trace.events) if keep_tensors else without_tensors(trace.events)
        whole = Trace(trace.header, events)
        last = self.step_of(whole)
        if last is None:
            raise ConfigError("the trace does not show the fault, so there is nothing to shrink")
        whole = Trace(trace.header, _until(events, last))
        before = None
        while before != (size := len(whole.events)):
            before = size
            whole = self._requests(whole)
            whole = self._start(whole)
            whole = self._lives(whole)
            whole = self._events(whole)
        if keep_tensors:
            at = max(i for i, event in enumerate(whole.events) if isinstance(event, Step))
            names = self._names(whole, at, tensor)
            whole = Trace(whole.header, without_tensors(whole.events, {at: names}))
        return whole

    def step_of(self, trace: Trace) -> int | None:
        """Return the first step of a trace that shows the fault; None if none does, or if it cannot be replayed."""
        replay = Replay(trace.header, max_num_reqs=len(trace.events))
        try:
            for event in trace.events:
                replay.apply(event)
        except ForewordError:
            return None
        self.num_tries += 1
        return self._failing(trace)

    def _fails(self, trace: Trace, events: Sequence[Event] | None) -> bool:
        return events is not None and num_steps(events) > 0 and self.step_of(Trace(trace.header, events)) is not None

    def _requests(self, trace: Trace) -> Trace:
        """Remove as many requests as possible."""

        def fails(kept: Sequence[str]) -> bool:
            return self._fails(trace, with_requests(trace.events, set(kept)))

        kept = minimal(requests_of(trace.events), fails)
        return Trace(trace.header, with_requests(trace.events, set(kept)))

    def _start(self, trace: Trace) -> Trace:
        """Find the latest step with which the trace can begin, by bisection."""
        low, high, best = 0, num_steps(trace.events) - 1, trace
        if high > 0 and self.step_of(last := Replay.rebase(trace, high)) is not None:
            return last
        while high - low > 1:
            middle = (low + high) // 2
            part = Replay.rebase(trace, middle)
            if self.step_of(part) is not None:
                low, best = middle, part
            else:
                high = middle
        return best

    def _lives(self, trace: Trace) -> Trace:
        """Remove as many steps as possible from the beginning and the end of each request, and as many tokens."""
        events: Sequence[Event] = trace.events
        for number in range(len(adds_of(events))):
            for change in (without_first_step, without_last_step):
                events = self._repeated(trace, events, change, number)
            part = shortened(trace.header, events, adds_of(events)[number])
            if part is not None and self._fails(trace, part):
                events = part
        return Trace(trace.header, events)

    def _repeated(
        self,
        trace: Trace,
        events: Sequence[Event],
        change: Callable[[Sequence[Event], int], list[Event] | None],
        number: int,
    ) -> Sequence[Event]:
        """Repeat the change as long as the trace still fails: 1, 2, 4 … times at once, then 1 again."""
        times = 1
        while times:
            part: list[Event] | None = list(events)
            for _ in range(times):
                part = None if part is None else change(part, adds_of(part)[number])
            if self._fails(trace, part) and part is not None:
                events, times = part, 2 * times
            else:
                times //= 2
        return events

    def _events(self, trace: Trace) -> Trace:
        """Remove single events as long as the trace still fails."""
        if len(trace.events) > 200:  # other changes never help, and each try costs a replay
            return trace
        return Trace(trace.header, minimal(trace.events, lambda part: self._fails(trace, part)))

    def _names(self, trace: Trace, at: int, tensor: str | None) -> list[str]:
        """Return the tensor that a step needs to fail: ``tensor``, or one that is found."""
        step = trace.events[at]
        assert isinstance(step, Step)
        for name in step.tensors if tensor is None else [tensor]:
            part = [*trace.events[:at], replace(step, tensors={name: step.tensors[name]}), *trace.events[at + 1 :]]
            if self._fails(trace, part):
                return [name]
        return list(step.tensors)


def minimal(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of the items that still fails, but passes if any one of its items is removed (Zeller's ddmin)."""
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for first in range(0, len(kept), size):
            rest = [*kept[:first], *kept[first + size :]]
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(2 * parts, len(kept))
    return kept


def _until(events: Sequence[Event], step: int) -> list[Event]:
    """Return the events up to a step."""
    at = [i for i, event in enumerate(events) if isinstance(event, Step)][step]
    return list(events[: at + 1])
