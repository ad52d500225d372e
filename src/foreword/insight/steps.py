"""Prepared steps as JSON, and as tables from a running engine."""

from __future__ import annotations

import json

from foreword.batch import InputBatch
from foreword.engine.observer import EngineObserver
from foreword.insight.record import STEP_TENSORS, values_of
from foreword.scheduler import StepPlan


def step_as_json(batch: InputBatch) -> str:
    """One line: the step's scalars and tensors by name; tensors that exist per KV group are lists."""
    return json.dumps({"step": batch.step, **values_of(batch, STEP_TENSORS)})


class StepInspector(EngineObserver):
    """Explains an engine's first steps. shown: `InputBatch.explain` of each, at most ``num_steps``."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.shown: list[str] = []

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        if len(self.shown) < self._num_steps:
            self.shown.append(str(batch.explain()))
