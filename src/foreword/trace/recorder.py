"""Convert captured values to events of a trace, and record the states of an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBatch, RequestStates
from foreword.batch.difference import extras_to_json
from foreword.errors import ConfigError, RequestError
from foreword.trace.capture import (
    Arrived,
    Capture,
    Captured,
    Ended,
    Exchanged,
    Failed,
    Filled,
    Freed,
    Grown,
    Growth,
    Planned,
    Repeated,
    Sampled,
    Waited,
)
from foreword.trace.events import Add, AppendBlocks, Arrive, Commit, End, Event, Fail, Remove, Step, Wait
from foreword.trace.header import TraceHeader
from foreword.trace.tensors import RECORDED, values_of
from foreword.trace.writer import TraceWriter, samples_of


class Encoder:
    """Converts the values that a `Capture` collected to events, in their order. The argument is the number of KV
    groups.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._ids: dict[int, str] = {}
        self._batch: list[str] = []
        self._samples: list[bool] = []  # those of the last step, by request
        self._pad_to: tuple[int, int] | None = None
        self._departed: set[str] = set()  # requests that left since the last step

    def events(self, captured: Iterable[Captured]) -> Iterator[Event]:
        """Return the events."""
        for value in captured:
            match value:
                case Filled():
                    self._ids[value.row] = value.req_id
                    yield add_of(value)
                case Freed():
                    if self._ids.pop(value.row, None) is not None:
                        self._departed.add(value.req_id)
                        yield Remove(req_id=value.req_id, preempted=value.preempted)
                case Exchanged():
                    pair = self._ids.pop(value.a, None), self._ids.pop(value.b, None)
                    self._ids |= {row: req_id for row, req_id in zip((value.b, value.a), pair, strict=True) if req_id}
                case Grown():
                    yield from self._growth(value.grown)
                case Planned():
                    yield from self._growth(value.grown)
                    yield self._step(value)
                case Repeated():
                    yield from self._growth(value.grown)
                    self._departed = set()
                    yield Step(req_ids=self._batch, counts=[1] * len(self._batch), pad_to=self._pad_to, time=value.time)
                case Sampled():
                    yield self._commit(value)
                case Failed():
                    yield Fail(error=value.error, time=value.time)
                case Arrived():
                    yield Arrive(req_id=value.req_id, num_prompt_tokens=value.num_prompt_tokens, time=value.time)
                case Ended():
                    yield End(req_id=value.req_id, reason=value.reason, time=value.time, arrival=value.arrival)
                case Waited():
                    yield Wait(req_id=value.req_id, reason=value.reason)

    def live(self, captured: Iterable[Captured]) -> list[Add]:
        """Return the requests of a snapshot, with which a trace begins."""
        self._ids.clear()
        self._batch, self._samples = [], []
        return [event for event in self.events(captured) if isinstance(event, Add)]

    def _growth(self, grown: Growth) -> Iterator[Event]:
        new: dict[str, list[I32]] = {}
        for group, (rows, counts, ids) in enumerate(grown):
            for row, part in zip(rows.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=False):
                blocks = new.setdefault(self._ids[row], [np.zeros(0, np.int32)] * self._num_groups)
                blocks[group] = part
        for req_id, of_groups in new.items():
            yield AppendBlocks(req_id=req_id, block_ids=of_groups)

    def _step(self, value: Planned) -> Step:
        self._batch, self._departed = [self._ids[row] for row in value.rows.tolist()], set()
        self._pad_to = value.pad_to
        self._samples = [True] * len(self._batch) if value.samples is None else value.samples.tolist()
        drafts: dict[str, I32] = {}
        if value.num_drafts is not None:
            pieces = np.split(value.draft_ids, np.cumsum(value.num_drafts)[:-1])
            drafts = {r: ids for r, ids in zip(self._batch, pieces, strict=True) if len(ids)}
        return Step(
            req_ids=self._batch,
            counts=value.counts,
            draft_tokens=drafts,
            pad_to=value.pad_to,
            zero=value.block_ops.zero,
            copies=value.block_ops.copies,
            tensors=value.tensors,
            time=value.time,
        )

    def _commit(self, value: Sampled) -> Commit:
        given = value.token_ids
        tokens = given if isinstance(given, Mapping) else samples_of(self._batch, given)
        counted = {r for r, is_kept in zip(self._batch, self._samples, strict=True) if is_kept} - self._departed
        logprobs = {self._batch[b]: values for b, values in value.logprobs.items() if self._batch[b] in counted}
        tokens = {r: list(map(int, ids)) for r, ids in tokens.items() if r in counted}
        return Commit(tokens=tokens, logprobs=logprobs, host_us=value.host_us, model_ms=value.model_ms)


def add_of(value: Filled) -> Add:
    """Return the event that admits a request."""
    given = {
        "sampling_params": value.sampling,
        "lora_request": value.lora,
        "mm_features": value.features,
        "pooling_params": value.pooling,
    }
    extras: dict[str, Any] = {}
    for name, one in given.items():
        if one:
            with suppress(RequestError):  # values that JSON cannot represent are left out
                extras |= {n: v for n, v in extras_to_json({name: one}, value.req_id).items() if v}
    return Add(
        req_id=value.req_id,
        prompt_token_ids=value.tokens[: value.prompt_len],
        output_token_ids=value.tokens[value.prompt_len :],
        num_computed_tokens=value.num_computed_tokens,
        prefill_len=value.prefill_len if value.prefill_len < len(value.tokens) else None,
        block_ids=value.blocks,
        lora_id=value.lora_id,
        cache_salt=value.cache_salt,
        cache_miss=value.cache_miss,
        bidirectional_ranges=() if value.ranges is None else value.ranges,
        mrope_positions=() if value.rotary is None else value.rotary,
        mrope_delta=value.rope_delta,
        extras=extras,
    )


class TraceRecorder:
    """Records the changes of an empty `RequestStates`, and its steps, to a file.

        with TraceRecorder("steps.jsonl", states, max_num_batched_tokens=…) as trace:
            batch = prepare_inputs(states, plan, buffers)
            trace.step(batch)                        # after prepare_inputs
            states.commit(batch, sampled)
            trace.commit(batch, sampled)             # the same samples

    The recorder observes the states, and so records admissions, removals and new blocks. Steps are recorded in their
    order.
    header: other fields of `TraceHeader`.
    """

    def __init__(self, path: str | Path, states: RequestStates, max_num_batched_tokens: int, **header: Any) -> None:
        if len(states):
            raise ConfigError(f"a trace starts with no requests, and there are {len(states)}: record from the start")
        self.writer = TraceWriter(path, TraceHeader.of_states(states, max_num_batched_tokens, **header))
        self._capture = Capture(states)
        self._encoder = Encoder(len(states.block_tables))

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording and close the file."""
        self._capture.close()
        self._write()
        self.writer.close()

    def step(
        self,
        batch: InputBatch,
        tensors: Mapping[str, Any] | None = None,
        *,
        preempted: Collection[str] = (),
        time: float | None = None,
    ) -> None:
        """Record a step that was just prepared. tensors: the tensors to record, by default all of the batch.

        preempted: the requests that left since the last step and will be added again.
        """
        given = values_of(batch, RECORDED) if tensors is None else tensors
        self._capture.step(batch, preempted=preempted, tensors=given, time=time)
        self._write()

    def commit(self, batch: InputBatch, sampled: Mapping[str, Sequence[int]] | I32) -> None:
        """Record the samples that were committed."""
        self._capture.commit(sampled)
        self._write()

    def write(self, event: Event) -> None:
        """Record an event that the states do not show, such as a `Correct`."""
        self._write()
        self.writer.write(event)

    def _write(self) -> None:
        for event in self._encoder.events(self._capture.take()):
            self.writer.write(event)
