"""Convert a trace to the data of a page: its steps with the tensors of each, its requests, and the pool of blocks.

All numbers come from a replay with `foreword.batch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.batch import InputBatch, bidirectional_ranges
from foreword.batch.proof.spec import TensorSpec
from foreword.cache import MEANING
from foreword.insight.blocks import BlockHolders
from foreword.trace.encoding import plain
from foreword.trace.events import (
    Add,
    Arrive,
    Commit,
    Correct,
    End,
    Event,
    Fail,
    Remove,
    Restart,
    Step,
    Tokens,
    Wait,
    count_of,
    ids_of,
)
from foreword.trace.header import TraceHeader
from foreword.trace.privacy import OF_TOKENS
from foreword.trace.replay import Replay
from foreword.trace.tensors import STEP_TENSORS, Value, value_of

PART_ENTRIES = 1 << 18
"""Number of entries after which a part ends, so that a browser reads a part quickly."""
TextOf = Callable[[int], str]
"""Returns the text of a token id for readers."""


@dataclass(slots=True, eq=False)
class ShownStep:
    """A step: the indices of its requests, its tensors, and the committed tokens of each request."""

    requests: list[int]
    tensors: Mapping[str, Value]
    sampled: list[tuple[int, Tokens]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the step as the page reads it."""
        sampled = [[request, plain(ids_of(tokens))] for request, tokens in self.sampled]
        return {
            "requests": self.requests,
            "tensors": {n: plain(v) for n, v in self.tensors.items()},
            "sampled": sampled,
        }

    def token_ids(self) -> Iterator[int]:
        """Return the ids of its tokens and of its sampled tokens."""
        yield from np.asarray(self.tensors.get("input_ids", ())).tolist()
        for _, tokens in self.sampled:
            yield from np.asarray(ids_of(tokens)).tolist()


class Shown:
    """Collects the data of a page, event by event.

    parts: the steps in parts of at most ``steps_per_part``, each of which a page reads as a whole. A part that
    `take_full` has taken is None.
    text_of: returns the text of a token id; with it, `part` and `writes` contain texts.
    """

    def __init__(
        self, header: TraceHeader, replay: Replay, steps_per_part: int = 64, text_of: TextOf | None = None
    ) -> None:
        self.replay = replay
        self.parts: list[list[ShownStep] | None] = []
        self.blocks: dict[int, list[list[Any]]] = {}  # [step, change, request, group, entry or source]
        self._header, self._steps_per_part = header, steps_per_part
        self._text_of = None if header.token_ids != "plain" else text_of
        self._specs = [s for s in STEP_TENSORS if not (header.token_ids == "omitted" and s.name in OF_TOKENS)]
        self._holders = BlockHolders(header)
        self._starts: list[int] = []  # the first step of each part
        self._num_taken = self._num_entries = 0
        self._last: ShownStep | None = None
        self._requests: dict[str, int] = {}
        self._logs: list[list[list[Any]]] = []  # for each request: [step, what happened, details]
        self._is_beginning = header.first_step > 1  # the next requests may be in progress
        self._prompts: list[int] = []
        self._writes: dict[int, list[list[Any]]] = {}  # [step, request, group, offset, position, ids]
        self._waits: list[list[Any]] = []  # [step, the request that is first, why it waits]
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("number", "tokens", "requests", "time", "model_ms", "host_us", "failed")
        }

    def apply(self, event: Event) -> None:
        """Replay an event and keep its data for the page. Raise PlanError if it cannot be replayed."""
        batch = self.replay.apply(event)
        at = self.replay.num_steps - (batch is not None)
        for change in self._holders.apply(event, batch):
            owner = self._request(change.request) if change.request else -1
            last = change.source if change.kind == "copy" else change.entry
            self.blocks.setdefault(change.block, []).append([at, change.kind, owner, change.group, last])
        match event:
            case Arrive():
                self._log(at, event.req_id, "arrived")
                self._prompts[self._requests[event.req_id]] = event.num_prompt_tokens
            case Add():
                computed = event.num_computed_tokens
                reused = None if computed and self._is_beginning else computed
                self._log(at, event.req_id, "added", reused, event.cache_miss)
                self._prompts[self._requests[event.req_id]] = count_of(event.prompt_token_ids)
            case Remove():
                self._log(at, event.req_id, "preempted" if event.preempted else "left")
            case Correct():
                self._log(at, event.req_id, "corrected")
            case End():
                self._log(at, event.req_id, "ended", event.reason)
            case Restart():
                self._is_beginning = event.first_step > 1
                self._waits.append([at, -1, ""])
                for req_id, i in self._requests.items():
                    if self._logs[i] and self._logs[i][-1][1] not in ("left", "ended"):
                        self._log(at, req_id, "left")
            case Step() if batch is not None:
                self._step(at, event, batch)
            case Commit() if self._last is not None:
                self._columns["model_ms"][-1], self._columns["host_us"][-1] = event.model_ms, event.host_us
                self._last.sampled = [(self._request(req_id), tokens) for req_id, tokens in event.tokens.items()]
            case Wait():
                self._waits.append([at, self._request(event.req_id) if event.req_id else -1, event.reason])
            case Fail() if at:
                self._columns["failed"][-1] = event.error

    def take_full(self) -> Iterator[str]:
        """Yield the JSON of each full part, and delete the part."""
        while self._num_taken < len(self.parts) - 1:
            yield self._take()

    def take_rest(self) -> Iterator[str]:
        """Yield the JSON of all other parts."""
        while self._num_taken < len(self.parts):
            yield self._take()

    def part(self, i: int) -> str:
        """Return the JSON of a part. Raise IndexError if it was taken or does not exist."""
        steps = self.parts[i] if 0 <= i < len(self.parts) else None
        if steps is None:
            raise IndexError(f"there is no part {i}")
        texts = self._texts(token for step in steps for token in step.token_ids())
        return as_text({"steps": [step.as_json() for step in steps], **texts})

    def writes(self, blocks: Iterable[int]) -> str:
        """Return the JSON of all writes to these blocks."""
        found = [self._writes.get(block, []) for block in blocks]
        ids = (token for writes in found for *_, tokens in writes if isinstance(tokens, list) for token in tokens)
        return as_text({"blocks": found, **self._texts(ids)})

    def index(self, name: str) -> dict[str, Any]:
        """Return all data except steps and writes. name: the name of the file or server."""
        header = self._header
        return {
            "file": name,
            "engine": header.engine,
            "token_ids": header.token_ids,
            "has_texts": self._text_of is not None,
            "budget": header.max_num_batched_tokens,
            "damage": "",
            "null": header.null_block,
            "groups": [
                {
                    "block_size": group.block_size,
                    "tokens_per_block": per_block,
                    "sliding_window": group.sliding_window,
                    "recurrent": group.recurrent,
                }
                for group, per_block in zip(header.kv_groups, self._holders.tokens_per_block, strict=True)
            ],
            "tensors": [_described(spec) for spec in self._specs],
            "requests": {"ids": list(self._requests), "prompts": self._prompts, "logs": self._logs},
            "misses": MEANING,
            "waits": self._waits,
            "steps": self._columns,
            "blocks": {"ids": (ids := sorted(self.blocks)), "logs": [self.blocks[block] for block in ids]},
            "starts": self._starts,
        }

    def _texts(self, ids: Iterable[int]) -> dict[str, Mapping[int, str]]:
        text_of = self._text_of
        return {} if text_of is None else {"texts": {token: text_of(token) for token in sorted(set(ids))}}

    def _take(self) -> str:
        text = self.part(self._num_taken)
        self.parts[self._num_taken] = None
        self._num_taken += 1
        return text

    def _log(self, at: int, req_id: str, what: str, *details: int | str | None) -> None:
        self._logs[self._request(req_id)].append([at, what, *details])

    def _request(self, req_id: str) -> int:
        if req_id not in self._requests:
            self._requests[req_id] = len(self._requests)
            self._logs.append([])
            self._prompts.append(0)
        return self._requests[req_id]

    def _step(self, at: int, event: Step, batch: InputBatch) -> None:
        requests = [self._request(req_id) for req_id in batch.req_ids]
        tensors = {s.name: value for s in self._specs if (value := _kept(batch, s)) is not None}
        if (ranges := bidirectional_ranges(batch)) is not None:
            tensors["bidirectional_ranges"] = ranges.copy()
        for name, one in (
            ("number", self.replay.step), ("tokens", batch.num_tokens), ("requests", batch.num_reqs),
            ("time", event.time), ("model_ms", None), ("host_us", None), ("failed", ""),
        ):  # fmt: skip
            self._columns[name].append(one)
        self._is_beginning = False
        for block, *write in self._written(batch, requests):
            self.blocks.setdefault(block, [])
            self._writes.setdefault(block, []).append([at, *write])
        part = self.parts[-1] if self.parts else None
        if part is None or len(part) == self._steps_per_part or self._num_entries > PART_ENTRIES:
            part, self._num_entries = [], 0
            self.parts.append(part)
            self._starts.append(at)
        self._last = ShownStep(requests, tensors)
        self._num_entries += sum(map(_size, tensors.values()))
        part.append(self._last)

    def _written(self, batch: InputBatch, requests: list[int]) -> Iterator[list[Any]]:
        """Yield [block, request, group, offset, position, ids] for each run of tokens that a step writes to a block."""
        has_ids = self._header.token_ids != "omitted"
        count = batch.num_tokens
        positions, owners, ids = batch.positions[:count], batch.req_indices[:count], batch.input_ids[:count]
        for g, group in enumerate(self._header.kv_groups):
            slots: I64 = batch.slot_mapping[g][:count]
            blocks, offsets = np.divmod(slots, group.block_size)
            ends = (np.diff(slots) != 1) | (np.diff(positions) != 1) | (np.diff(owners) != 0) | (np.diff(blocks) != 0)
            cuts = [0, *(np.flatnonzero(ends) + 1).tolist(), count]
            for first, last in pairwise(cuts):
                if first < last and slots[first] >= 0:
                    tokens = ids[first:last].tolist() if has_ids else last - first
                    place = (int(offsets[first]), int(positions[first]), tokens)
                    yield [int(blocks[first]), requests[owners[first]], g, *place]


def as_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, separators=(",", ":"))


def _size(value: Value) -> int:
    return sum(map(np.size, value)) if isinstance(value, list) else np.size(value)  # type: ignore[arg-type]


def _kept(batch: InputBatch, spec: TensorSpec) -> Value:
    """Return a copy of a tensor of a step that later steps do not change. Columns of null entries at the end of block
    tables are left out.
    """
    value = value_of(batch, spec)
    if spec.name == "block_table" and isinstance(value, list):
        null = batch.states.null_block
        return [
            table[:, : int(np.max(np.flatnonzero((table != null).any(0)), initial=-1)) + 1].copy() for table in value
        ]
    if spec.attribute == "explain" and isinstance(value, list) and not spec.per_group:
        value = value[0]  # equal in every group
    if isinstance(value, list):
        return [array.copy() for array in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "level": spec.level.value,
        "shape": spec.shape,
        "definition": spec.definition,
        "per_group": spec.per_group,
    }
