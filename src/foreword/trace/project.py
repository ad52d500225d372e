"""Parts of a trace: fewer requests, fewer steps of a request, shorter requests. Each part can be replayed alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.trace.events import (
    Add,
    AppendBlocks,
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
)
from foreword.trace.header import TraceHeader
from foreword.trace.tensors import NAMED

_OFFSETS = {"query_start_loc": "T", "cu_num_logits": "L", "cu_num_draft_tokens": "D"}
"""Tensors of prefix sums, and the axis that they divide."""
_INDICES = {"logits_indices": "T", "target_logits_indices": "L", "bonus_logits_indices": "L"}
"""Tensors with indices of an axis; each entry belongs to a request."""


def requests_of(events: Sequence[Event]) -> list[str]:
    """Return the requests that are added, in their order."""
    return list(dict.fromkeys(event.req_id for event in events if isinstance(event, Add)))


def with_requests(events: Sequence[Event], kept: Collection[str]) -> list[Event]:
    """Return only the events of these requests. The tensors of each step are reduced to their entries."""
    out: list[Event] = []
    step: Step | None = None
    for event in events:
        match event:
            case Step():
                if (step := cut_step(event, kept)) is not None:
                    out.append(step)
            case Commit() | Fail():
                if step is not None:
                    out.append(_cut_commit(event, kept) if isinstance(event, Commit) else event)
            case Add() | AppendBlocks() | Arrive() | Correct() | End() | Remove() | Wait():
                if event.req_id in kept:
                    out.append(event)
            case _:
                out.append(event)
    return out


def cut_step(step: Step, kept: Collection[str]) -> Step | None:
    """Return a step with only these requests, without padding; None if it has none of them."""
    rows = [b for b, req_id in enumerate(step.req_ids) if req_id in kept]
    if not rows:
        return None
    if len(rows) == len(step.req_ids):
        return step
    axes = _Axes(step, rows)
    tensors = {name: part for name, value in step.tensors.items() if (part := axes.part(name, value)) is not None}
    counts = [int(n) for n in step.counts]
    return replace(
        step,
        req_ids=[step.req_ids[b] for b in rows],
        counts=[counts[b] for b in rows],
        draft_tokens={req_id: ids for req_id, ids in step.draft_tokens.items() if req_id in kept},
        pad_to=None,
        tensors=tensors,
    )


def _cut_commit(commit: Commit, kept: Collection[str]) -> Commit:
    return replace(
        commit,
        tokens={req_id: ids for req_id, ids in commit.tokens.items() if req_id in kept},
        logprobs={req_id: values for req_id, values in commit.logprobs.items() if req_id in kept},
    )


class _Axes:
    """The entries of each axis of a step that belong to some of its requests."""

    def __init__(self, step: Step, rows: list[int]) -> None:
        drafts = np.array([count_of(step.draft_tokens.get(req_id, ())) for req_id in step.req_ids], np.int64)
        sizes = {"T": np.asarray(step.counts, np.int64), "L": drafts + 1, "D": drafts, "B": np.ones_like(drafts)}
        self._rows, self._sizes = np.array(rows), sizes
        self._starts = {axis: np.concatenate([[0], np.cumsum(size)]) for axis, size in sizes.items()}
        self._kept: dict[str, I64] = {}
        self._shift: dict[str, I64] = {}  # the number of removed entries before each request
        for axis, size in sizes.items():
            starts = self._starts[axis]
            self._kept[axis] = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in rows])
            new = np.concatenate([[0], np.cumsum(size[rows])[:-1]])
            self._shift[axis] = np.zeros(len(size), np.int64)
            self._shift[axis][rows] = starts[rows] - new

    def part(self, name: str, value: Any) -> Any:
        """Return the entries of a tensor that are kept; None if the entries do not belong to requests."""
        try:
            return self._part(name, value)
        except (IndexError, TypeError, ValueError):  # the tensor does not have the form that it should have
            return None

    def _part(self, name: str, value: Any) -> Any:
        if name == "req_ids":
            return [value[b] for b in self._rows]
        tensor = NAMED.get(name)
        if tensor is None or not tensor.shape:
            return None
        if tensor.per_group:
            return [self._of_array(name, tensor.shape[0], one) for one in value]
        return self._of_array(name, tensor.shape[0], value)

    def _of_array(self, name: str, axis: str, value: Any) -> Any:
        if axis == "dims":  # a row per dimension of an entry per token
            return [self._of_array(name, "T", row) for row in value]
        axis = axis.removesuffix("+1").replace("p", "")
        if name in _OFFSETS:
            array = np.asarray(value)
            return np.concatenate([[0], np.cumsum(array[self._rows + 1] - array[self._rows])]).tolist()
        entries = [value[i] for i in self._kept[axis].tolist()]
        if name in _INDICES:
            owners = np.repeat(self._rows, self._sizes[axis][self._rows])
            return (np.asarray(entries, np.int64) - self._shift[_INDICES[name]][owners]).tolist()
        if name == "req_indices":
            found = {int(b): i for i, b in enumerate(self._rows)}
            return [found.get(int(b), -1) for b in entries]
        return entries


def without_first_step(events: Sequence[Event], at: int) -> list[Event] | None:
    """Return the events without the first step of the request that event ``at`` adds: it is admitted with the tokens
    and blocks that it had after that step. None if it takes part in no step, or is corrected before.
    """
    add = events[at]
    if not isinstance(add, Add) or isinstance(add.prompt_token_ids, int) or isinstance(add.output_token_ids, int):
        return None
    blocks = [list(ids) for ids in add.block_ids]
    dropped: set[int] = set()
    for i in range(at + 1, len(events)):
        event = events[i]
        if isinstance(event, Restart) or (isinstance(event, Remove | Correct) and event.req_id == add.req_id):
            return None
        if isinstance(event, AppendBlocks) and event.req_id == add.req_id:
            blocks = [[*held, *new] for held, new in zip(blocks, event.block_ids, strict=True)]
            dropped.add(i)
        if isinstance(event, Step) and add.req_id in event.req_ids:
            break
    else:
        return None
    tokens: Tokens = ()
    step, commit_at = event, None
    for j in range(i + 1, len(events)):
        later = events[j]
        if isinstance(later, Step):
            break
        if isinstance(later, Commit):
            tokens, commit_at = later.tokens.get(add.req_id, ()), j
            break
    if isinstance(tokens, int):
        return None
    known = len(add.prompt_token_ids) + len(add.output_token_ids)
    drafts = count_of(step.draft_tokens.get(add.req_id, ()))
    counts = dict(zip(step.req_ids, step.counts, strict=True))
    admitted = replace(
        add,
        output_token_ids=[*add.output_token_ids, *tokens],
        num_computed_tokens=add.num_computed_tokens + int(counts[add.req_id]) - (drafts + 1 - max(len(tokens), 1)),
        prefill_len=known if add.prefill_len is None and len(tokens) else add.prefill_len,
        block_ids=blocks,
    )
    others = set(step.req_ids) - {add.req_id}
    out: list[Event] = []
    for k, one in enumerate(events):
        if k == at:
            out.append(admitted)
        elif k == i:
            out += [part for part in [cut_step(step, others)] if part is not None]
        elif k == commit_at and isinstance(one, Commit):
            out += [part for part in [_cut_commit(one, others)] if others]
        elif k not in dropped:
            out.append(one)
    return out


def without_last_step(events: Sequence[Event], at: int) -> list[Event] | None:
    """Return the events without the last step of the request that event ``at`` adds: it waits in its row instead. None
    if it takes part in no step.
    """
    add = events[at]
    if not isinstance(add, Add):
        return None
    last = None
    for i in range(at + 1, len(events)):
        event = events[i]
        if isinstance(event, Restart) or (isinstance(event, Remove) and event.req_id == add.req_id):
            break
        if isinstance(event, Step) and add.req_id in event.req_ids:
            last = i
    if last is None:
        return None
    step = events[last]
    assert isinstance(step, Step)
    others = set(step.req_ids) - {add.req_id}
    out, is_after = list(events[:last]), True
    out += [part for part in [cut_step(step, others)] if part is not None]
    for event in events[last + 1 :]:
        if isinstance(event, Step):
            is_after = False
        if isinstance(event, Commit) and is_after:
            if others:
                out.append(_cut_commit(event, others))
        elif not (isinstance(event, Correct) and event.req_id == add.req_id and is_after):
            out.append(event)
    return out


def shortened(header: TraceHeader, events: Sequence[Event], at: int) -> list[Event] | None:
    """Return the events with fewer tokens at the beginning of the request that event ``at`` adds. Whole blocks of every
    KV group that are already computed are removed, or half of them if these are all of its tokens. None if there are no
    such blocks, or if steps have tensors, because positions in them would differ.
    """
    add = events[at]
    if not isinstance(add, Add) or isinstance(add.prompt_token_ids, int) or add.num_computed_tokens == 0:
        return None
    if any(isinstance(event, Step) and event.tensors for event in events):
        return None
    if any(isinstance(event, Correct) and event.req_id == add.req_id for event in events):
        return None
    sizes = [g.tokens_per_block(header.context_parallel, header.max_model_len) for g in header.kv_groups]
    whole = int(
        np.lcm.reduce([size for size, g in zip(sizes, header.kv_groups, strict=True) if not g.recurrent] or [1])
    )
    count = min(add.num_computed_tokens, len(add.prompt_token_ids) - 1) // whole * whole
    if not count:
        return None
    blocks = [
        ids if group.recurrent else ids[count // size :]
        for ids, size, group in zip(add.block_ids, sizes, header.kv_groups, strict=True)
    ]
    extras, features = dict(add.extras), add.extras.get("mm_features")
    if features:
        if any(feature.get("offset", 0) < count for feature in features):
            return None
        extras["mm_features"] = [{**feature, "offset": feature["offset"] - count} for feature in features]
    rotary = [list(row)[count:] for row in add.mrope_positions]
    shorter = replace(
        add,
        prompt_token_ids=add.prompt_token_ids[count:],
        num_computed_tokens=add.num_computed_tokens - count,
        prefill_len=None if add.prefill_len is None else add.prefill_len - count,
        block_ids=blocks,
        bidirectional_ranges=[(max(a - count, 0), b - count) for a, b in add.bidirectional_ranges if b > count],
        mrope_positions=rotary,
        mrope_delta=add.mrope_delta + count if rotary else add.mrope_delta,
        extras=extras,
    )
    return [*events[:at], shorter, *events[at + 1 :]]


def adds_of(events: Sequence[Event]) -> list[int]:
    """Return the indices of the events that add requests."""
    return [i for i, event in enumerate(events) if isinstance(event, Add)]


def num_steps(events: Sequence[Event]) -> int:
    """Return the number of steps."""
    return sum(isinstance(event, Step) for event in events)


def without_tensors(events: Sequence[Event], keep: Mapping[int, Collection[str]] | None = None) -> list[Event]:
    """Return the events without tensors, except the given tensors of the steps at the given indices."""
    kept = keep or {}
    return [
        replace(event, tensors={n: v for n, v in event.tensors.items() if n in kept.get(i, ())})
        if isinstance(event, Step)
        else event
        for i, event in enumerate(events)
    ]
