"""Observers of an engine that record its steps as a trace."""

from __future__ import annotations

from pathlib import Path

from foreword.batch import InputBatch
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineObserver
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan
from foreword.trace.recorder import TraceRecorder


class EngineRecorder(EngineObserver):
    """Records the steps of an engine without requests, as a `TraceRecorder` of its states; close it at the end.

    The engine's executor has to read gathered block tables if the trace is to have them.
    """

    def __init__(self, path: str | Path, engine: Engine) -> None:
        self._trace = TraceRecorder(path, engine.states, engine.config.scheduler.max_num_batched_tokens)
        self._engine = engine
        engine.observers.add(self)

    def close(self) -> None:
        """Stop recording and close the file."""
        self._engine.observers.remove(self)
        self._trace.close()

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self._trace.step(batch)

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self._trace.commit(batch, sampled.token_ids)
