"""Measure the host time per step of the native and NumPy backends, and of Python lists that build the same tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch import (
    Backend,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequests,
    RequestStates,
    prepare_inputs,
    sampling_metadata,
)
from foreword.bench.traffic import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_TOKENS,
    TEMPERATURE,
    TOP_P,
    VOCAB_SIZE,
    WORKLOADS,
    Step,
    Workload,
)
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostResult:
    """Medians in µs. prepare: state changes, tensors and sampling metadata of a step; commit: recording its samples."""

    workload: str
    engine: str
    prepare_us: float
    commit_us: float


class Contender(Protocol):
    """An engine's input layer. ``take`` and ``ready``, not timed, convert a step and its result into its form."""

    name: str

    def take(self, step: Step) -> None: ...
    def prepare(self) -> object: ...
    def ready(self) -> None: ...
    def commit(self) -> None: ...
    def tensors(self) -> dict[str, AnyArray]: ...


def new_states(workload: Workload) -> tuple[RequestStates, InputBuffers]:
    """Return empty states and buffers of the sizes that a workload needs."""
    states = RequestStates(
        max_num_reqs=workload.max_num_reqs,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        kv_groups=[KVGroup(block_size=BLOCK_SIZE)],
        max_num_draft_tokens=workload.num_drafts,
    )
    return states, InputBuffers.for_states(states, MAX_NUM_TOKENS)


class Ours:
    """Foreword with array inputs: the engine keeps the row numbers of requests."""

    def __init__(self, workload: Workload, num_steps: int, backend: Backend) -> None:
        self.name = f"foreword ({backend})"
        self.states, self.buffers = new_states(workload)
        self.backend = backend
        self.rows = np.zeros(workload.decodes + num_steps * (workload.max_num_reqs + 1), np.int32)

    def take(self, step: Step) -> None:
        a = step.arrived
        self.step = step
        self.new = NewRequests(
            req_ids=[str(n) for n in a.numbers],
            token_ids=a.tokens,
            num_tokens=a.num_tokens,
            block_ids=[a.blocks],
            num_blocks=[a.num_blocks],
            num_computed_tokens=a.num_computed,
            sampling={
                "temperature": np.full(len(a.numbers), TEMPERATURE, np.float32),
                "top_p": np.full(len(a.numbers), TOP_P, np.float32),
            },
        )
        self.departed = self.rows[step.departed]
        # Rows of the scheduled requests; those that arrive in this step come last and get their rows in `prepare`.
        self.running = self.rows[step.scheduled]
        self.appended = self.rows[step.appended]
        self.appended_new = np.flatnonzero(np.isin(step.appended, a.numbers))
        self.arrived = np.zeros(0, np.int32)

    def prepare(self) -> InputBatch:
        self.change_rows()
        plan = self.running, self.step.num_scheduled
        drafts = self.step.drafts
        self.batch = prepare_inputs(self.states, plan, self.buffers, draft_tokens=drafts, backend=self.backend)
        self.sampling = sampling_metadata(self.batch)
        return self.batch

    def change_rows(self) -> None:
        """Apply the scheduler's changes: requests that left and arrived, and new blocks."""
        step, states = self.step, self.states
        if len(self.departed):
            states.remove_rows(self.departed)
        if count := len(self.new.req_ids):
            self.arrived = self.running[-count:] = states.add_requests(self.new)
            if len(self.appended_new):
                first = step.arrived.numbers[0]
                self.appended[self.appended_new] = self.arrived[step.appended[self.appended_new] - first]
        if len(self.appended):
            states.append_blocks_rows(self.appended, step.new_blocks)

    def ready(self) -> None:
        """Record the rows of the new requests."""
        self.rows[self.step.arrived.numbers] = self.arrived

    def commit(self) -> None:
        self.states.commit(self.batch, self.step.sampled)

    def tensors(self) -> dict[str, AnyArray]:
        b = self.batch
        return {"input_ids": b.input_ids, "positions": b.positions, "slot_mapping": b.slot_mapping[0]}


@dataclass(slots=True, eq=False)
class _Sequence:
    tokens: list[int]
    computed: int
    blocks: list[int]
    temperature: float = TEMPERATURE
    top_p: float = TOP_P


class PythonLists:
    """The method of small engines: one Python object per request, loops over requests and tokens, and then arrays."""

    name = "python lists"

    def __init__(self) -> None:
        self.sequences: dict[int, _Sequence] = {}

    def take(self, step: Step) -> None:
        a = step.arrived
        self.new = [
            (number, _Sequence(tokens.tolist(), computed, blocks.tolist()))
            for number, tokens, computed, blocks in zip(
                a.numbers.tolist(),
                np.split(a.tokens, np.cumsum(a.num_tokens)),
                a.num_computed.tolist(),
                np.split(a.blocks, np.cumsum(a.num_blocks)),
                strict=False,
            )
        ]
        self.appended = list(zip(step.appended.tolist(), step.new_blocks.tolist(), strict=True))
        drafts: list[list[int]] = [[]] * len(step.scheduled) if step.drafts is None else step.drafts.tolist()
        self.scheduled = list(zip(step.scheduled.tolist(), step.num_scheduled.tolist(), drafts, strict=True))
        self.sampled = [[token for token in row if token >= 0] for row in step.sampled.tolist()]
        self.departed = step.departed.tolist()

    def prepare(self) -> object:
        for number in self.departed:
            del self.sequences[number]
        for number, sequence in self.new:
            self.sequences[number] = sequence
        for number, block in self.appended:
            self.sequences[number].blocks.append(block)
        batch = [self.sequences[number] for number, _, _ in self.scheduled]
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start_loc = [0]
        seq_lens: list[int] = []
        logits: list[int] = []
        for s, (_, n, drafts) in zip(batch, self.scheduled, strict=True):
            end = s.computed + n
            input_ids += s.tokens[s.computed : end - len(drafts)] + drafts
            positions += range(s.computed, end)
            for p in range(s.computed, end):
                slots.append(s.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
            query_start_loc.append(query_start_loc[-1] + n)
            seq_lens.append(end)
            logits += range(query_start_loc[-1] - 1 - len(drafts), query_start_loc[-1])
        width = max(len(s.blocks) for s in batch)
        self.arrays: dict[str, AnyArray] = {
            "input_ids": np.array(input_ids, np.int32),
            "positions": np.array(positions, np.int64),
            "slot_mapping": np.array(slots, np.int64),
            "query_start_loc": np.array(query_start_loc, np.int32),
            "seq_lens": np.array(seq_lens, np.int32),
            "logits_indices": np.array(logits, np.int64),
            "block_table": np.array([s.blocks + [-1] * (width - len(s.blocks)) for s in batch], np.int32),
            "temperature": np.array([s.temperature for s in batch], np.float32),
            "top_p": np.array([s.top_p for s in batch], np.float32),
        }
        return self.arrays

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        for (number, n, drafts), sampled in zip(self.scheduled, self.sampled, strict=True):
            s = self.sequences[number]
            s.computed += n - len(drafts)
            if s.computed == len(s.tokens):  # otherwise it is a part of a prompt
                s.computed += len(sampled) - 1
                s.tokens += sampled

    def tensors(self) -> dict[str, AnyArray]:
        return self.arrays


def run(
    *, num_steps: int = 300, chunk: int = 25, workloads: tuple[Workload, ...] = WORKLOADS
) -> Iterator[list[HostResult]]:
    """Measure each workload: all contenders get the same steps, in turns of ``chunk`` steps, and their tensors must
    agree after each turn. The first turn is not counted. Raise ConfigError unless num_steps > chunk.

    Yields the results of one workload at a time, Foreword's native backend first.
    """
    if num_steps <= chunk:
        raise ConfigError(f"num_steps = {num_steps}: the first turn is not counted; give more than chunk = {chunk}")
    for workload in workloads:
        steps = list(workload.steps(num_steps))
        ours = Ours(workload, num_steps, "native")
        contenders: list[Contender] = [ours, Ours(workload, num_steps, "numpy"), PythonLists()]
        times: list[tuple[list[int], list[int]]] = [([], []) for _ in contenders]
        gc.collect()
        gc.disable()
        try:
            for start in range(0, num_steps, chunk):
                for contender, (prepare, commit) in zip(contenders, times, strict=True):
                    for step in steps[start : start + chunk]:
                        contender.take(step)
                        _timed(contender.prepare, prepare)
                        contender.ready()
                        _timed(contender.commit, commit)
                    _compare(ours, contender, workload.name, start)
        finally:
            gc.enable()
        yield [
            HostResult(workload.name, c.name, _median_us(p[chunk:]), _median_us(m[chunk:]))
            for c, (p, m) in zip(contenders, times, strict=True)
        ]


def _timed(call: Callable[[], object], into: list[int]) -> None:
    start = time.perf_counter_ns()
    call()
    into.append(time.perf_counter_ns() - start)


def _compare(ours: Contender, other: Contender, workload: str, step: int) -> None:
    theirs = other.tensors()
    for name, tensor in ours.tensors().items():
        if not np.array_equal(tensor, theirs[name]):
            raise AssertionError(f"{workload}, step {step}: {other.name} differs in {name}")


def _median_us(nanoseconds: list[int]) -> float:
    return float(np.median(nanoseconds)) / 1e3
