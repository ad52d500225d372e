"""Record steps as a trace that `foreword.insight.conform` can replay. The format: docs/conformance.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBatch, RequestStates
from foreword.batch.proof.spec import TENSORS, Level, TensorSpec
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineObserver
from foreword.errors import ConfigError
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan

FORMAT = 1
GROUP_KEYS = ("block_size", "sliding_window", "context_parallel", "recurrent")

STEP_TENSORS = tuple(spec for spec in TENSORS if spec.level is not Level.SYSTEM)
# Row numbers, which differ between engines, and what only this library has.
_OWN = {"idx_mapping", "expanded_idx_mapping", "row_generation", "num_placeholders", "num_blocks"}
RECORDED = tuple(spec for spec in STEP_TENSORS if spec.attribute != "explain" and spec.name not in _OWN)
"""The tensors of a trace."""


def value_of(batch: InputBatch, spec: TensorSpec) -> Any:
    """A tensor of a step as plain lists, one per KV group if it exists per group; None if the step does not have it."""
    if spec.optional == "gathered block tables" and not batch.is_gathered:
        return None
    if spec.attribute == "explain":
        return [getattr(batch.explain(group), spec.name).tolist() for group in range(len(batch.slot_mapping))]
    value = getattr(batch, spec.name)
    if spec.per_group:
        return [array.tolist() for array in value]
    if isinstance(value, Enum):
        return value.name
    return None if value is None else np.asarray(value).tolist()


def values_of(batch: InputBatch, specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """``req_ids``, and those of the tensors that the step has, by name."""
    values = {spec.name: value_of(batch, spec) for spec in specs}
    return {"req_ids": list(batch.req_ids)} | {name: value for name, value in values.items() if value is not None}


class TraceRecorder:
    """Records the changes of an empty `RequestStates`.

        with TraceRecorder("steps.jsonl", states, max_num_batched_tokens=…) as trace:
            batch = prepare_inputs(states, plan, buffers)
            trace.step(batch)                        # after prepare_inputs
            states.commit(batch, sampled)
            trace.commit(batch, sampled)             # the same samples

    Arrivals, departures and new blocks are recorded as an observer of the states. Steps are recorded in their order.
    """

    def __init__(self, path: str | Path, states: RequestStates, max_num_batched_tokens: int) -> None:
        if len(states):
            raise ConfigError(f"a trace starts with no requests, and there are {len(states)}: record from the start")
        self._states = states
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._held: dict[str, list[int]] = {}  # blocks recorded so far, per request and group
        self._write(_header(states, max_num_batched_tokens))
        states.observers.append(self)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording and close the file."""
        if self in self._states.observers:
            self._states.observers.remove(self)
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    # -- called by the states ----------------------------------------------------------------------------------------

    def filled(self, row: int) -> None:
        """A request was admitted."""
        s = self._states
        known, prompt = int(s.num_tokens[row]), int(s.prompt_len[row])
        blocks = [t.table[row, : t.num_blocks[row]].tolist() for t in s.block_tables]
        self._held[s.req_id_of(row)] = [len(ids) for ids in blocks]
        self._write(
            {
                "add": {
                    "req_id": s.req_id_of(row),
                    "prompt_token_ids": s.token_ids[row, :prompt].tolist(),
                    "output_token_ids": s.token_ids[row, prompt:known].tolist(),
                    "num_computed_tokens": int(s.num_computed_tokens[row]),
                    "block_ids": blocks,
                }
            }
        )

    def freed(self, row: int) -> None:
        """A request is about to be removed."""
        req_id = self._states.req_id_of(row)
        if self._held.pop(req_id, None) is not None:
            self._write({"remove": req_id})

    def exchanged(self, a: int, b: int) -> None:
        """Row numbers are not part of a trace."""

    # -- called for each step ------------------------------------------------------------------------------------------

    def step(self, batch: InputBatch) -> None:
        """Record a step that was just prepared."""
        for req_id, row in zip(batch.req_ids, batch.idx_mapping.tolist(), strict=True):
            self._write_new_blocks(req_id, row)
        counts = batch.num_scheduled_tokens.tolist()
        plan: dict[str, Any] = {"num_scheduled_tokens": dict(zip(batch.req_ids, counts, strict=True))}
        if len(batch.draft_token_ids):
            drafts = np.split(batch.draft_token_ids, batch.cu_num_draft_tokens[1:-1])
            plan["draft_tokens"] = {r: ids.tolist() for r, ids in zip(batch.req_ids, drafts, strict=True) if len(ids)}
        padded = batch.num_tokens_padded, batch.num_reqs_padded
        if padded != (batch.num_tokens, batch.num_reqs):
            plan["pad_to"] = padded
        self._write({"step": plan, "tensors": values_of(batch, RECORDED)})

    def commit(self, batch: InputBatch, sampled: Mapping[str, Sequence[int]] | I32) -> None:
        """Record the samples that were committed."""
        if isinstance(sampled, Mapping):
            lists = {req_id: [int(t) for t in tokens] for req_id, tokens in sampled.items()}
        else:
            table = sampled[:, None] if sampled.ndim == 1 else sampled
            lists = {r: [t for t in row if t >= 0] for r, row in zip(batch.req_ids, table.tolist(), strict=True)}
        self._write({"commit": {req_id: tokens for req_id, tokens in lists.items() if tokens}})

    def _write_new_blocks(self, req_id: str, row: int) -> None:
        tables, held = self._states.block_tables, self._held[req_id]
        new = [t.table[row, n : t.num_blocks[row]].tolist() for t, n in zip(tables, held, strict=True)]
        if any(new):
            self._held[req_id] = [n + len(ids) for n, ids in zip(held, new, strict=True)]
            self._write({"append_blocks": {"req_id": req_id, "block_ids": new}})


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


def _header(states: RequestStates, max_num_batched_tokens: int) -> dict[str, Any]:
    cp, groups = states.context_parallel, [table.group for table in states.block_tables]
    return {
        "foreword_trace": FORMAT,
        "max_num_reqs": states.max_num_reqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": states.max_model_len,
        "vocab_size": states.vocab_size,
        "null_block": states.null_block,
        "max_num_draft_tokens": states.max_num_draft_tokens,
        "context_parallel": None if cp is None else asdict(cp),
        "kv_groups": [{name: getattr(group, name) for name in GROUP_KEYS} for group in groups],
    }


def step_as_json(batch: InputBatch) -> str:
    """One line: the step's scalars and tensors by name; tensors that exist per KV group are lists."""
    return json.dumps({"step": batch.step, **values_of(batch, STEP_TENSORS)})


class StepInspector(EngineObserver):
    """Explains an engine's first steps. shown: `InputBatch.explain` of each, at most ``num_steps``, of this width."""

    def __init__(self, num_steps: int, width: int | None = None) -> None:
        self._num_steps, self._width = num_steps, width
        self.shown: list[str] = []

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        if len(self.shown) < self._num_steps:
            self.shown.append(str(batch.explain(width=self._width)))
