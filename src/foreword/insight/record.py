"""Write the steps of an engine as text: as JSON, and as explained tables."""

from __future__ import annotations

import json
from collections.abc import Callable

from foreword.batch import InputBatch
from foreword.engine.observer import EngineObserver
from foreword.insight.changes import StepChanges
from foreword.scheduler import StepPlan
from foreword.trace.encoding import plain
from foreword.trace.tensors import STEP_TENSORS, values_of


def step_as_json(batch: InputBatch) -> str:
    """Return one line with the step's scalars and tensors by name; tensors that exist per KV group are lists."""
    values = {name: plain(value) for name, value in values_of(batch, STEP_TENSORS).items()}
    return json.dumps({"step": batch.step, **values})


class StepInspector(EngineObserver):
    """Explains an engine's first steps.

    shown: for each of at most ``num_steps`` steps, the text of `InputBatch.explain` in this width, and the changes
    since the step before. text_of: returns the text of a token id for the tables.
    """

    def __init__(self, num_steps: int, width: int | None = None, text_of: Callable[[int], str] | None = None) -> None:
        self._num_steps, self._width, self._text_of = num_steps, width, text_of
        self._changes = StepChanges(text_of)
        self.shown: list[str] = []

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        if len(self.shown) < self._num_steps:
            text = str(batch.explain(width=self._width, text_of=self._text_of))
            self.shown.append("\n\n".join(filter(None, [text, self._changes.since_last(batch, self._width)])))
