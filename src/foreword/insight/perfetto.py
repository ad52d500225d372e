"""Write a trace in Chrome's trace-event format, which ui.perfetto.dev shows: steps, requests, times, blocks.

Times are microseconds since the beginning of the trace. In a trace without times step k begins at k milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import ForewordError, PlanError
from foreword.insight.blocks import BlockHolders
from foreword.trace.events import Add, Arrive, Commit, End, Event, Fail, Remove, Restart, Step
from foreword.trace.header import TraceHeader
from foreword.trace.reader import Trace
from foreword.trace.replay import Replay

STEPS, REQUESTS, BLOCKS = 1, 2, 3
"""The processes of the timeline."""
STEP, HOST, MODEL = 1, 2, 3
"""The threads of the first process."""
NAMES = {
    (STEPS, 0): "engine", (STEPS, STEP): "steps", (STEPS, HOST): "host", (STEPS, MODEL): "model",
    (REQUESTS, 0): "requests", (BLOCKS, 0): "blocks", (BLOCKS, 1): "changes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timeline:
    """The size and contents of a written file. damage: the reason why it ends before the end of the trace."""

    num_steps: int
    num_events: int
    damage: PlanError | None

    def __str__(self) -> str:
        return f"{self.num_steps} steps, {self.num_events} events"


def write_timeline(path: str | Path, out: str | Path) -> Timeline:
    """Write the timeline of a trace to a file. Raise PlanError if the first line is not that of a trace."""
    trace = Trace.read(path)
    try:
        maker = _Maker(trace)
    except ForewordError as error:
        raise PlanError(f"{path}, line 1: {error}") from error
    damage = trace.damage
    for event in trace.events:
        try:
            maker.apply(event)
        except ForewordError as error:
            damage = PlanError(f"{path}, line {event.line}: {error}")
            break
    events = maker.finished()
    with Path(out).open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file, separators=(",", ":"))
    return Timeline(maker.replay.num_steps, len(events), damage)


class _Maker:
    def __init__(self, trace: Trace) -> None:
        self.replay = Replay(trace.header, max_num_reqs=len(trace.events))
        self._header: TraceHeader = trace.header
        self._starts = _starts(trace)
        self._holders = BlockHolders(trace.header)
        self._out: list[dict[str, Any]] = []
        self._open: dict[str, str] = {}  # request → its state, whose slice has begun
        self._number_of: dict[str, int] = {}
        self._now = 0.0
        self._step: Step | None = None

    def apply(self, event: Event) -> None:
        """Replay an event, and add it to the timeline."""
        batch = self.replay.apply(event)
        step = self.replay.num_steps - (batch is not None)
        if not isinstance(event, Commit | Fail):
            self._now = max(self._now, self._starts[min(step, len(self._starts) - 1)])
        for change in self._holders.apply(event, batch):
            args = {"block": change.block, "request": change.request, "group": change.group, "entry": change.entry}
            args |= {"source": change.source} if change.kind == "copy" else {}
            self._out.append(self._event("i", change.kind, BLOCKS, 1, s="t", args=args))
        match event:
            case Arrive():
                self._now = max(self._now, _us(event.time))
                self._state(event.req_id, "waiting")
            case Add():
                self._state(event.req_id, "running")
            case Remove():
                self._state(event.req_id, "preempted" if event.preempted else None)
            case End():
                self._now = max(self._now, _us(event.time))
                self._state(event.req_id, None)
            case Restart():
                for req_id in list(self._open):
                    self._state(req_id, None)
            case Step() if batch is not None:
                self._step = event
                for name, value in (("tokens", batch.num_tokens), ("requests", batch.num_reqs)):
                    self._out.append(self._event("C", name, STEPS, 0, args={name: value}))
                self._out.append(self._event("C", "held", BLOCKS, 0, args={"held": self._holders.num_held}))
            case Commit():
                self._ran({"sampled": sum(map(len, _tokens(event)))}, event.host_us, event.model_ms)
            case Fail():
                self._ran({"error": event.error}, None, None)

    def finished(self) -> list[dict[str, Any]]:
        """Return all events by time, after the names of the tracks."""
        if self._step is not None:
            self._ran({}, None, None)
        self._now = max(self._now, self._starts[-1])
        for req_id in list(self._open):
            self._state(req_id, None)
        names = [
            {
                "ph": "M",
                "name": "thread_name" if tid else "process_name",
                "pid": pid,
                "tid": tid,
                "args": {"name": name},
            }
            for (pid, tid), name in NAMES.items()
        ]
        return names + sorted(self._out, key=lambda event: event["ts"])

    def _event(self, kind: str, name: str, pid: int, tid: int, **others: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": round(self._now, 3), **others}

    def _state(self, req_id: str, state: str | None) -> None:
        """End the slice of a request's state, and begin the slice of the next state; None: the request ended."""
        before = self._open.pop(req_id, None)
        number = self._number_of.setdefault(req_id, len(self._number_of) + 1)
        common = {"cat": "request", "id": number}
        if before is not None:
            self._out.append(self._event("e", before, REQUESTS, 0, **common))
        if state is not None:
            self._out.append(self._event("b", state, REQUESTS, 0, **common, args={"request": req_id}))
            self._open[req_id] = state

    def _ran(self, args: dict[str, Any], host_us: float | None, model_ms: float | None) -> None:
        """Add the slices of the last step. A slice that would overlap the next step is cut at its start; the arguments
        of the slice have the whole time.
        """
        step, self._step = self._step, None
        if step is None:
            return
        number = self.replay.num_steps - 1
        start, most = self._starts[number], self._starts[number + 1] - self._starts[number]
        lasted = {"host": host_us, "model": None if model_ms is None else 1000 * model_ms}
        known = [us for us in lasted.values() if us is not None]
        whole = sum(known) if known else most
        counts = dict(zip(step.req_ids, map(int, step.counts), strict=True))
        args = {"tokens": counts, "host_us": host_us, "model_ms": model_ms, **args}
        for tid, name, us in ((STEP, f"step {self.replay.step}", whole), (HOST, "host", lasted["host"]),
                              (MODEL, "model", lasted["model"])):  # fmt: skip
            if us is not None:
                slice_ = {"ph": "X", "name": name, "pid": STEPS, "tid": tid, "ts": round(start, 3)}
                self._out.append(slice_ | {"dur": round(min(us, most), 3), "args": args if tid == STEP else {"us": us}})


def _tokens(event: Commit) -> Iterator[range]:
    for tokens in event.tokens.values():
        yield range(tokens) if isinstance(tokens, int) else range(len(tokens))


def _us(time: float | None) -> float:
    return 0.0 if time is None else 1e6 * time


def _starts(trace: Trace) -> list[float]:
    """Return the start of each step in microseconds, and then the end of the last step."""
    steps = [event for event in trace.events if isinstance(event, Step)]
    if any(step.time is None for step in steps) or not steps:
        return [1000.0 * i for i in range(len(steps) + 1)]
    starts = [_us(step.time) for step in steps]
    for i in range(1, len(starts)):
        starts[i] = max(starts[i], starts[i - 1])
    commits = [event for event in trace.events if isinstance(event, Commit)]
    last = commits[-1] if commits else None
    lasted = ((last.host_us or 0.0) + 1000 * (last.model_ms or 0.0)) if last is not None else 0.0
    return [*starts, starts[-1] + max(lasted, 1000.0)]
