"""Prepared steps as JSON, and as tables from a running engine."""

from __future__ import annotations

import json
from typing import Any

from foreword.batch import InputBatch, RequestStates
from foreword.engine.observer import EngineObserver
from foreword.scheduler import StepPlan

_ARRAYS = (
    "idx_mapping",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "query_start_loc",
    "seq_lens",
    "req_indices",
    "positions",
    "input_ids",
    "logits_indices",
)
_DERIVED = ("token_indices", "block_table_indices", "block_numbers", "block_offsets")


def step_as_json(batch: InputBatch, states: RequestStates) -> str:
    """One line: the step's scalars and tensors by name; tensors that exist per KV group are lists."""
    step: dict[str, Any] = {
        "step": batch.step,
        "num_reqs": batch.num_reqs,
        "num_tokens": batch.num_tokens,
        "max_query_len": batch.max_query_len,
        "max_seq_len": batch.max_seq_len,
        "attention_state": batch.attention_state.name,
        "req_ids": batch.req_ids,
    }
    step |= {name: getattr(batch, name).tolist() for name in _ARRAYS}
    explained = [batch.explain(group=g) for g in range(len(states.block_tables))]
    step |= {name: [getattr(e, name).tolist() for e in explained] for name in _DERIVED}
    step["slot_mapping"] = [slots.tolist() for slots in batch.slot_mapping]
    step["block_table"] = [table.tolist() for table in batch.block_table]
    return json.dumps(step)


class StepInspector(EngineObserver):
    """Explains an engine's first steps. shown: `InputBatch.explain` of each, at most ``num_steps``."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.shown: list[str] = []

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        if len(self.shown) < self._num_steps:
            self.shown.append(str(batch.explain()))
