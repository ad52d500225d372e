"""Replay a trace of steps from any engine and report where its tensors differ from the definition.

The format: docs/conformance.md. Golden traces made from the definition ship in ``vectors/``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch import (
    Backend,
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    prepare_inputs,
)
from foreword.batch.proof.spec import TensorSpec
from foreword.errors import ForewordError, PlanError
from foreword.insight.record import FORMAT, RECORDED, STEP_TENSORS, value_of
from foreword.integers import INT32_MAX, is_int32
from foreword.jsonfile import parse_object, read_bytes

VECTORS = Path(__file__).parent / "vectors"
_SPECS = {
    spec.name: spec for spec in STEP_TENSORS if spec in RECORDED or spec.name in ("block_numbers", "block_offsets")
}
_REQUEST = {field.name: field.default is MISSING for field in fields(NewRequest)}
"""The fields of a request, and whether each is required."""
_EVENTS = {"add", "append_blocks", "remove", "step", "commit"}
MAX_ENTRIES, MAX_GROUPS = 2**28, 256
"""Limits of a replay: the entries of all its arrays, 4 bytes each, and its KV groups."""


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
        values = (value if isinstance(value, str) else reprlib.repr(value) for value in (self.expected, self.got))
        expected, got = (f"{text:.80}" for text in values)
        return f"line {self.line}, step {self.step}: {self.tensor}{where}{owner}: expected {expected}, got {got}"


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
    lines = read_bytes(Path(path), PlanError).splitlines()
    replay = _Replay(backend, len(lines))
    for number, line in enumerate(lines, 1):
        if line.strip():
            replay.apply(number, line, f"{path}, line {number}")
    if replay.states is None:
        raise PlanError(f"{path}: the trace is empty; its first line must be a header")
    return Report(str(path), replay.num_steps, replay.num_tensors, tuple(replay.differences))


class _Replay:
    states: RequestStates | None = None
    batch: InputBatch | None = None
    num_steps = num_tensors = 0

    def __init__(self, backend: Backend, num_lines: int) -> None:
        self.backend: Backend = backend
        self.num_lines = num_lines
        self.differences: list[Difference] = []

    def apply(self, number: int, line: bytes, source: str) -> None:
        event = parse_object(line, source, PlanError)
        try:
            if self.states is None:
                self._begin(event)
            else:
                self._apply(self.states, number, event)
        except KeyError as error:
            raise PlanError(f"{source}: the key {error} is missing") from error
        except ForewordError as error:
            raise PlanError(f"{source}: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PlanError(f"{source}: cannot be replayed ({error})") from error

    def _apply(self, states: RequestStates, number: int, event: dict[str, Any]) -> None:
        if len(_EVENTS & event.keys()) != 1:
            raise PlanError(f"expected one of add, append_blocks, remove, step and commit, got {sorted(event)}")
        match event:
            case {"add": dict(request)}:
                if unknown := request.keys() - _REQUEST.keys():
                    raise PlanError(f"add: unknown field {min(unknown)!r}; use {', '.join(sorted(_REQUEST))}")
                if missing := [name for name, required in _REQUEST.items() if required and name not in request]:
                    raise PlanError(f"add: the field {missing[0]!r} is missing")
                states.add_request(NewRequest(**request))
            case {"append_blocks": {"req_id": req_id, "block_ids": block_ids}}:
                states.append_blocks(req_id, block_ids)
            case {"remove": req_id}:
                states.row_of(req_id)  # raises for an unknown request
                states.remove_request(req_id)
            case {"step": plan, **rest}:
                self._step(states, number, plan, rest.get("tensors", {}))
            case {"commit": sampled}:
                if self.batch is None:
                    raise PlanError("a commit needs a step before it")
                states.commit(self.batch, sampled)
            case _:
                raise PlanError("append_blocks needs req_id and block_ids, add the fields of a request")

    def _begin(self, header: dict[str, Any]) -> None:
        if header.get("foreword_trace") != FORMAT:
            raise PlanError(f'the first line must hold "foreword_trace": {FORMAT}')
        cp = header.get("context_parallel")
        groups = [KVGroup(**group) for group in header["kv_groups"][: MAX_GROUPS + 1]]
        if len(groups) > MAX_GROUPS:
            raise PlanError(f"kv_groups: {len(header['kv_groups'])} groups, above the limit of {MAX_GROUPS}")
        sizes = {name: header[name] for name in ("max_num_reqs", "max_num_batched_tokens", "max_model_len")}
        drafts = header.get("max_num_draft_tokens", 0)
        for name, size in (*sizes.items(), ("max_num_draft_tokens", drafts)):
            if not is_int32(size, 0):
                raise PlanError(f"{name}={reprlib.repr(size)}: must be in [0, {INT32_MAX}]")
        reqs, tokens, length = sizes.values()
        reqs = min(reqs, self.num_lines)  # one line adds one request at most
        blocks = sum(-(-length // group.block_size) for group in groups)
        entries = reqs * (length + 2 * blocks + 2 * drafts) + tokens * (8 + 2 * len(groups))
        if entries > MAX_ENTRIES:
            raise PlanError(
                f"{sizes}, max_num_draft_tokens={drafts}: the replay of {self.num_lines} lines would need {entries} "
                f"entries, above the limit of {MAX_ENTRIES}; record with the sizes that the engine uses"
            )
        self.states = RequestStates(
            max_num_reqs=reqs,
            max_model_len=length,
            vocab_size=header["vocab_size"],
            kv_groups=groups,
            max_num_draft_tokens=drafts,
            context_parallel=None if cp is None else ContextParallel(**cp),
            null_block=header.get("null_block", 0),
        )
        self.buffers = InputBuffers.for_states(self.states, tokens)

    def _step(self, states: RequestStates, number: int, plan: dict[str, Any], tensors: dict[str, Any]) -> None:
        pads = plan.get("pad_to")
        self.batch = batch = prepare_inputs(
            states,
            plan["num_scheduled_tokens"],
            self.buffers,
            draft_tokens=plan.get("draft_tokens"),
            pad_to=None if pads is None else (pads[0], pads[1]),
            order=plan.get("order", "given"),
            backend=self.backend,
            check="full" if self.backend == "device" else "off",  # its tensors are elsewhere than the batch's arrays
        )
        self.num_steps += 1
        for name, theirs in tensors.items():
            self.num_tensors += 1
            found = next(_differences(batch, name, theirs), None)
            if found is not None:
                index, request, expected, got = found
                self.differences.append(Difference(number, self.num_steps, name, index, request, expected, got))


def _differences(batch: InputBatch, name: str, theirs: Any) -> Iterator[tuple[tuple[int, ...], str | None, Any, Any]]:
    """(index, request, expected, got) of the entries of one tensor that differ."""
    spec = _SPECS.get(name)
    if spec is None and name != "req_ids":
        yield (), None, "the name of a tensor (docs/conformance.md)", "an unknown name"
        return
    ours = value_of(batch, spec) if spec else list(batch.req_ids)
    if spec and ours is None:
        yield (), None, f"no such tensor without {spec.optional} in the first line", theirs
        return
    if isinstance(ours, list) and not isinstance(theirs, list):
        yield (), None, "a list", theirs
        return
    for index, expected, got in _compare(ours, theirs, _axes(batch, spec) if spec else [None]):
        yield index, _owner(batch, spec, index[spec.per_group :]) if spec else None, expected, got


Axis = tuple[Any, int] | None


def _axes(batch: InputBatch, spec: TensorSpec) -> list[Axis]:
    """Per axis (value of entries past the end, entries that must be given); None: as many entries as in the definition.

    Padding may be absent, and the width of block tables depends on the engine.
    """
    named: dict[Any, Any] = {"T": batch.num_tokens, "null": batch.states.null_block}
    pad = named.get(spec.padding, spec.padding)
    given = {"Tp": batch.num_tokens, "Bp": batch.num_reqs, "Bp+1": batch.num_reqs + 1, "K": 0}
    axes: list[Axis] = [(pad, given[axis]) if axis in given else None for axis in spec.shape]
    if axes[1:]:
        axes[0] = [], batch.num_reqs  # a row that is absent has no entries
    return [None, *axes] if spec.per_group else axes


def _compare(
    ours: Any, theirs: Any, axes: Sequence[Axis], at: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """(index, expected, got) of the values that differ."""
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        if ours != theirs:
            yield at, ours, theirs
        return
    axis, *inner = axes
    if len(theirs) < axis[1] if axis else len(theirs) != len(ours):
        yield at, f"{len(ours)} entries", f"{len(theirs)}"
        return
    for i, (expected, got) in enumerate(zip_longest(ours, theirs, fillvalue=axis and axis[0])):
        yield from _compare(expected, got, inner, (*at, i))


def _owner(batch: InputBatch, spec: TensorSpec, index: tuple[int, ...]) -> str | None:
    """The request that an entry belongs to, None for padding."""
    if not index or not spec.shape:
        return None
    requests = np.arange(batch.num_reqs)
    owners: dict[str, AnyArray] = {
        "T": batch.req_indices,
        "L": np.repeat(requests, np.diff(batch.cu_num_logits)),
        "D": np.repeat(requests, np.diff(batch.cu_num_draft_tokens)),
    }
    of_entry = owners.get(spec.shape[0][0], requests)
    return batch.req_ids[of_entry[index[0]]] if index[0] < len(of_entry) else None
