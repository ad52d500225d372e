"""Compare the steps of a trace on two backends: every tensor, also of steps that were recorded without tensors."""

from __future__ import annotations

from pathlib import Path

from foreword.batch import Backend
from foreword.errors import ForewordError, PlanError
from foreword.insight.conform import Report
from foreword.trace.compare import Difference, first_difference
from foreword.trace.reader import TraceReader
from foreword.trace.replay import Replay
from foreword.trace.tensors import RECORDED, values_of


def replay_steps(path: str | Path, *, backend: Backend = "auto") -> Report:
    """Prepare each step of a trace with a backend, and compare its tensors with those of the definition (loops).

    The report's ``damage`` says where the replay had to end. Raise PlanError if the first line is not that of a trace.
    """
    reader = TraceReader(path)
    try:
        count = reader.num_lines()
        defined, tried = (Replay(reader.header, backend=name, max_num_reqs=count) for name in ("loops", backend))
    except ForewordError as error:
        raise PlanError(f"{path}, line 1: {error}") from error
    differences, num_tensors, damage = list[Difference](), 0, None
    try:
        for event in reader:
            try:
                expected, got = defined.apply(event), tried.apply(event)
            except ForewordError as error:
                raise PlanError(f"{path}, line {event.line}: {error}") from error
            if expected is not None and got is not None:
                for name, value in values_of(got, RECORDED).items():
                    num_tensors += 1
                    found = first_difference(expected, name, value, line=event.line, step=defined.step)
                    differences += [] if found is None else [found]
    except PlanError as error:
        damage = error
    return Report(str(path), defined.num_steps, num_tensors, tuple(differences), damage)
