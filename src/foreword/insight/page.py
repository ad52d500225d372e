"""A trace as one static page: its steps, the tensors of each, its requests, and the pool of blocks.

Every number of the page is that of a replay with `foreword.batch`. The page holds them in compressed parts, of which a
browser reads those that are shown.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.batch import InputBatch
from foreword.batch.proof.spec import TensorSpec
from foreword.errors import ForewordError, PlanError
from foreword.insight.blocks import BlockChange, BlockHolders
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
    count_of,
    ids_of,
)
from foreword.trace.header import TraceHeader
from foreword.trace.privacy import OF_TOKENS
from foreword.trace.reader import TraceReader
from foreword.trace.replay import Replay
from foreword.trace.tensors import STEP_TENSORS, value_of

STEPS_PER_PART, BLOCKS_PER_PART = 64, 64
PART_BYTES = 1 << 20
"""A part ends after so many bytes of JSON, so that a browser reads it at once."""
MAX_BYTES = 1 << 28
"""The most that all parts of a page take, compressed. Steps after that are left out, and the page says so."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a page shows. damage: why it ends before the end of the file."""

    num_steps: int
    num_bytes: int
    damage: PlanError | None

    def __str__(self) -> str:
        per_step = self.num_bytes / max(self.num_steps, 1)
        return f"{self.num_steps} steps, {self.num_bytes} bytes, {per_step:.0f} per step"


def write_page(path: str | Path, out: str | Path, *, max_bytes: int = MAX_BYTES) -> Inspected:
    """Write the page of a trace to a file.

    What cannot be read or replayed ends the page, which says where. PlanError for a first line that is none.
    """
    reader = TraceReader(path)
    maker = _Maker(reader.header, _replay(reader))
    damage: PlanError | None = None
    try:
        for event in reader:
            try:
                maker.apply(event)
            except ForewordError as error:
                raise PlanError(f"{path}, line {event.line}: {error}") from error
            if maker.num_bytes > max_bytes:
                raise PlanError(
                    f"{path}, line {event.line}: the page ends here, at its limit of {max_bytes} bytes; "
                    "record shorter files (--record FILE:SIZE)"
                )
    except PlanError as error:
        damage = error
    text = maker.page(Path(path).name, damage)
    Path(out).write_text(text, encoding="utf-8")
    return Inspected(maker.replay.num_steps, len(text.encode()), damage)


def _replay(reader: TraceReader) -> Replay:
    try:
        return Replay(reader.header, max_num_reqs=reader.num_lines())
    except ForewordError as error:
        raise PlanError(f"{reader.path}, line 1: {error}") from error


def packed(value: Any) -> str:
    """Return a value as JSON, compressed (zlib), in base64."""
    return b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)).decode()


class _Maker:
    """Collects what a page shows, event by event."""

    def __init__(self, header: TraceHeader, replay: Replay) -> None:
        self.replay = replay
        self.num_bytes = 0
        self._header = header
        self._specs = [s for s in STEP_TENSORS if not (header.token_ids == "omitted" and s.name in OF_TOKENS)]
        self._holders = BlockHolders(header)
        self._parts: list[str] = []
        self._starts: list[int] = []  # the first step of each part
        self._part: list[dict[str, Any]] = []
        self._part_bytes = 0
        self._requests: dict[str, int] = {}
        self._logs: list[list[list[Any]]] = []  # of each request: [step, what happened, a number or a text]
        self._prompts: list[int] = []
        self._blocks: dict[int, list[list[Any]]] = {}  # [step, change, request, group, entry or source]
        self._writes: dict[int, list[list[Any]]] = {}  # [step, request, group, offset, position, ids]
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("number", "tokens", "requests", "time", "model_ms", "host_us", "failed")
        }

    @property
    def _next(self) -> int:
        """The place of the next step."""
        return self.replay.num_steps

    def apply(self, event: Event) -> None:
        """Replay an event and keep what the page shows of it. PlanError for one that cannot be replayed."""
        batch = self.replay.apply(event)
        at = self._next - (batch is not None)
        for change in self._holders.apply(event, batch):
            self._block_changed(at, change)
        match event:
            case Arrive():
                self._log(at, event.req_id, "arrived")
                self._prompts[self._requests[event.req_id]] = event.num_prompt_tokens
            case Add():
                self._log(at, event.req_id, "added", event.num_computed_tokens)
                self._prompts[self._requests[event.req_id]] = count_of(event.prompt_token_ids)
            case Remove():
                self._log(at, event.req_id, "preempted" if event.preempted else "left")
            case Correct():
                self._log(at, event.req_id, "corrected")
            case End():
                self._log(at, event.req_id, "ended", event.reason)
            case Restart():
                for req_id, i in self._requests.items():
                    if self._logs[i][-1][1] not in ("left", "ended"):
                        self._log(at, req_id, "left")
            case Step() if batch is not None:
                self._step(at, event, batch)
            case Commit():
                self._commit(event)
            case Fail() if at:
                self._columns["failed"][-1] = event.error

    def page(self, name: str, damage: PlanError | None) -> str:
        """Return the page's text."""
        self._close_part()
        blocks = sorted(self._blocks.keys() | self._writes.keys())
        ranges = [blocks[i : i + BLOCKS_PER_PART] for i in range(0, len(blocks), BLOCKS_PER_PART)]
        writes = [packed([self._writes.get(block, []) for block in part]) for part in ranges]
        header = self._header
        index = {
            "file": name,
            "engine": header.engine,
            "token_ids": header.token_ids,
            "budget": header.max_num_batched_tokens,
            "damage": str(damage) if damage else "",
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
            "steps": self._columns,
            "blocks": {"ids": blocks, "logs": [self._blocks.get(block, []) for block in blocks]},
            "starts": self._starts,
            "blocks_per_part": BLOCKS_PER_PART,
        }
        parts = {"index": packed(index)}
        parts |= {f"s{i}": part for i, part in enumerate(self._parts)} | {
            f"b{i}": part for i, part in enumerate(writes)
        }
        data = "\n".join(f'<script type="text/plain" id="{name}">{part}</script>' for name, part in parts.items())
        template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        return template.replace("<!-- title -->", escape(name)).replace("<!-- data -->", data)

    def _log(self, at: int, req_id: str, what: str, detail: int | str = "") -> None:
        i = self._request(req_id)
        self._logs[i].append([at, what, detail])

    def _request(self, req_id: str) -> int:
        if req_id not in self._requests:
            self._requests[req_id] = len(self._requests)
            self._logs.append([])
            self._prompts.append(0)
        return self._requests[req_id]

    def _block_changed(self, at: int, change: BlockChange) -> None:
        owner = self._request(change.request) if change.request else -1
        last = change.source if change.kind == "copy" else change.entry
        self._blocks.setdefault(change.block, []).append([at, change.kind, owner, change.group, last])

    def _step(self, at: int, event: Step, batch: InputBatch) -> None:
        tensors: dict[str, Any] = {}
        for spec in self._specs:
            value = _shown(batch, spec)
            if value is not None:
                tensors[spec.name] = value
        requests = [self._request(req_id) for req_id in batch.req_ids]
        for name, value in (
            ("number", self.replay.step), ("tokens", batch.num_tokens), ("requests", batch.num_reqs),
            ("time", event.time), ("model_ms", None), ("host_us", None), ("failed", ""),
        ):  # fmt: skip
            self._columns[name].append(value)
        for row in self._written(batch, requests):
            self._writes.setdefault(row[0], []).append([at, *row[1:]])
        self._keep({"requests": requests, "tensors": tensors})

    def _written(self, batch: InputBatch, requests: list[int]) -> Iterator[list[Any]]:
        """[block, request, group, offset, position, ids] of each run of tokens that a step writes to a block."""
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

    def _commit(self, event: Commit) -> None:
        if not self._next:
            return
        self._columns["model_ms"][-1], self._columns["host_us"][-1] = event.model_ms, event.host_us
        sampled = [[self._request(req_id), plain(ids_of(tokens))] for req_id, tokens in event.tokens.items()]
        self._part[-1]["sampled"] = sampled

    def _keep(self, step: dict[str, Any]) -> None:
        if len(self._part) == STEPS_PER_PART or self._part_bytes > PART_BYTES:
            self._close_part()
        if not self._part:
            self._starts.append(self._next - 1)
        self._part.append(step)
        self._part_bytes += 4 * sum(map(_entries, step["tensors"].values()))

    def _close_part(self) -> None:
        if self._part:
            self._parts.append(packed(self._part))
            self.num_bytes += len(self._parts[-1])
            self._part, self._part_bytes = [], 0


def _entries(value: Any) -> int:
    return sum(map(_entries, value)) if isinstance(value, list) else 1


def _shown(batch: InputBatch, spec: TensorSpec) -> Any:
    """Return a tensor of a step as JSON; rows of block tables without the null entries at their ends."""
    value = value_of(batch, spec)
    if spec.name == "block_table" and isinstance(value, list):
        null = batch.states.null_block
        return [[row[: int(np.max(np.flatnonzero(row != null), initial=-1)) + 1].tolist() for row in t] for t in value]
    if spec.attribute == "explain" and isinstance(value, list) and not spec.per_group:
        value = value[0]  # the same in every group
    return plain(value)


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "level": spec.level.value,
        "shape": spec.shape,
        "definition": spec.definition,
        "per_group": spec.per_group,
    }
