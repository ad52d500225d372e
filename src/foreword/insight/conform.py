"""Replay a trace of steps from any engine and report where its tensors differ from the definition.

The format: docs/conformance.md. Golden traces made from the definition ship in ``vectors/``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch import (
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    prepare_inputs,
)
from foreword.batch.proof.spec import TENSORS, TensorSpec
from foreword.batch.values.plan import Backend
from foreword.errors import ForewordError, PlanError
from foreword.insight.record import FORMAT, RECORDED

VECTORS = Path(__file__).parent / "vectors"
_DERIVED = tuple(spec for spec in TENSORS if spec.name in ("block_numbers", "block_offsets"))
_SPECS = {spec.name: spec for spec in (*RECORDED, *_DERIVED)}
_EVENTS = {"add", "append_blocks", "remove", "step", "commit"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry that differs in one tensor of one step."""

    line: int
    step: int
    tensor: str
    index: tuple[int, ...]
    request: str | None
    expected: object
    got: object

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        owner = f" (request {self.request!r})" if self.request is not None else ""
        return (
            f"line {self.line}, step {self.step}: {self.tensor}{where}{owner}: expected {self.expected}, got {self.got}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay."""

    path: str
    num_steps: int
    num_tensors: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        head = f"{self.path}: {self.num_steps} steps, {self.num_tensors} tensors compared"
        if self.ok:
            return f"{head}: all as defined"
        return "\n".join([f"{head}: {len(self.differences)} differ", *(f"  {d}" for d in self.differences)])


def golden_vectors() -> list[Path]:
    """The traces that ship with the library."""
    return sorted(VECTORS.glob("*.jsonl"))


def run(path: str | Path, *, backend: Backend = "auto") -> Report:
    """Replay a trace. Differences are reported; PlanError, with the line, for a trace that cannot be replayed."""
    replay = _Replay(backend)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            replay.apply(number, json.loads(line))
        except (ForewordError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if replay.states is None:
        raise PlanError(f"{path}: the trace is empty; its first line must be a header")
    return Report(str(path), replay.num_steps, replay.num_tensors, tuple(replay.differences))


class _Replay:
    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self.states: RequestStates | None = None
        self.batch: InputBatch | None = None
        self.num_steps = self.num_tensors = 0
        self.differences: list[Difference] = []

    def apply(self, number: int, line: dict[str, Any]) -> None:
        if self.states is None:
            self._begin(line)
            return
        states = self.states
        if len(_EVENTS & line.keys()) != 1:
            raise ValueError(f"expected one of add, append_blocks, remove, step and commit, got {sorted(line)}")
        match line:
            case {"add": request}:
                states.add_request(NewRequest(**request))
            case {"append_blocks": {"req_id": req_id, "block_ids": block_ids}}:
                states.append_blocks(req_id, block_ids)
            case {"remove": req_id}:
                states.row_of(req_id)  # raises for an unknown request
                states.remove_request(req_id)
            case {"step": plan, **rest}:
                self._step(number, plan, rest.get("tensors", {}))
            case {"commit": sampled}:
                if self.batch is None:
                    raise ValueError("a commit needs a step before it")
                states.commit(self.batch, sampled)
            case _:
                raise ValueError("append_blocks needs req_id and block_ids")

    def _begin(self, header: dict[str, Any]) -> None:
        if header.get("foreword_trace") != FORMAT:
            raise ValueError(f'the first line must hold "foreword_trace": {FORMAT}')
        cp = header.get("context_parallel")
        self.states = RequestStates(
            max_num_reqs=header["max_num_reqs"],
            max_model_len=header["max_model_len"],
            vocab_size=header["vocab_size"],
            kv_groups=[KVGroup(**group) for group in header["kv_groups"]],
            max_num_draft_tokens=header.get("max_num_draft_tokens", 0),
            context_parallel=None if cp is None else ContextParallel(**cp),
            null_block=header.get("null_block", 0),
        )
        self.buffers = InputBuffers.for_states(self.states, header["max_num_batched_tokens"])

    def _step(self, number: int, plan: dict[str, Any], tensors: dict[str, Any]) -> None:
        assert self.states is not None
        pads = plan.get("pad_to")
        self.batch = batch = prepare_inputs(
            self.states,
            plan["num_scheduled_tokens"],
            self.buffers,
            draft_tokens=plan.get("draft_tokens"),
            pad_to=None if pads is None else (pads[0], pads[1]),
            order=plan.get("order", "given"),
            backend=self.backend,
        )
        self.num_steps += 1
        for name, theirs in tensors.items():
            self.num_tensors += 1
            found = next(_differences(batch, name, theirs), None)
            if found is not None:
                index, request, expected, got = found
                self.differences.append(Difference(number, self.num_steps, name, index, request, expected, got))


Found = tuple[tuple[int, ...], str | None, object, object]


def _differences(batch: InputBatch, name: str, theirs: Any) -> Iterator[Found]:
    """(index, request, expected, got) of the entries of one tensor that differ."""
    if name == "req_ids":
        yield from _compare(list(batch.req_ids), theirs, ())
        return
    if name not in _SPECS:
        raise ValueError(f"{name} is not a tensor of a trace; use one of req_ids, {', '.join(_SPECS)}")
    spec = _SPECS[name]
    ours: Any
    if spec in _DERIVED:
        ours = [getattr(batch.explain(g), name) for g in range(len(batch.slot_mapping))]
    else:
        ours = getattr(batch, name)
    if ours is None:
        raise ValueError(f"{name} needs {spec.optional} in the first line")
    if (spec.per_group or np.ndim(ours)) and not isinstance(theirs, list):
        raise ValueError(f"{name}: expected a list, got {theirs!r}")
    if name == "attention_state":
        yield from _compare([ours.name], [theirs], None)
    elif spec.per_group:
        if len(theirs) != len(ours):
            yield (), None, f"{len(ours)} KV groups", f"{len(theirs)}"
        for g, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _arrays(batch, spec, mine, other, (g,))
    elif np.ndim(ours) == 0:
        yield from _compare([int(ours)], [theirs], None)
    else:
        yield from _arrays(batch, spec, ours, theirs, ())


def _arrays(batch: InputBatch, spec: TensorSpec, ours: Any, theirs: Any, prefix: tuple[int, ...]) -> Iterator[Found]:
    """Differences of two arrays, which may differ in length by entries that hold padding."""
    mine = ours.tolist()
    named = {"T": batch.num_tokens, "null": batch.states.null_block}
    pad: Any = named[spec.padding] if isinstance(spec.padding, str) else spec.padding
    # The width of block tables depends on the engine.
    if ours.ndim == 2 and all(isinstance(row, list) for row in theirs):
        widest = max(map(len, (*mine, *theirs)), default=0)
        mine, theirs = ([[*row, *[pad] * (widest - len(row))] for row in table] for table in (mine, theirs))
    if spec.padding is not None:
        if isinstance(pad, int) and ours.ndim == 2:
            pad = [pad] * len((mine or theirs or [[]])[0])
        longest = max(len(mine), len(theirs))
        live = {"Tp": batch.num_tokens, "Bp": batch.num_reqs, "Bp+1": batch.num_reqs + 1}[spec.shape[0]]
        mine += [pad] * (longest - len(mine))
        if len(theirs) >= live:
            theirs = list(theirs) + [pad] * (longest - len(theirs))
    for index, request, expected, got in _compare(mine, theirs, prefix):
        yield index, request or _owner(batch, spec, index[len(prefix) :]), expected, got


def _compare(mine: list[Any], theirs: list[Any], prefix: tuple[int, ...] | None) -> Iterator[Found]:
    if len(mine) != len(theirs):
        yield prefix or (), None, f"{len(mine)} entries", f"{len(theirs)}"
        return
    for i, (expected, got) in enumerate(zip(mine, theirs, strict=True)):
        if expected == got:
            continue
        if isinstance(expected, list) and isinstance(got, list):
            yield from _compare(expected, got, (*(prefix or ()), i))
        else:
            yield () if prefix is None else (*prefix, i), None, expected, got


def _owner(batch: InputBatch, spec: TensorSpec, index: tuple[int, ...]) -> str | None:
    """The request that an entry belongs to, None for padding."""
    if not index:
        return None
    requests = np.arange(batch.num_reqs)
    owners: dict[str, AnyArray] = {
        "T": batch.req_indices,
        "L": np.repeat(requests, np.diff(batch.cu_num_logits)),
        "D": np.repeat(requests, np.diff(batch.cu_num_draft_tokens)),
    }
    of_entry = owners.get(spec.shape[0][0], requests)
    return batch.req_ids[of_entry[index[0]]] if index[0] < len(of_entry) else None
