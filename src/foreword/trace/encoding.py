"""Convert events to lines of JSON, and back. docs/conformance.md describes the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from foreword.errors import PlanError, shown
from foreword.integers import INT32_MAX, is_int32
from foreword.trace.events import (
    KINDS,
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
)
from foreword.trace.header import TraceHeader

EXTRAS = ("sampling_params", "lora_request", "mm_features", "pooling_params")
MAX_TIME = 1e15
"""The limit of times, in any unit."""
_RUN = ("model_ms", "host_us")
"""The keys of a commit's line that hold the times of the step."""
_TIMES = ("time", "arrival")


def plain(value: Any) -> Any:
    """Return arrays, NumPy's numbers, and tuples or lists of them as lists and numbers of Python."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return value if all(type(item) is int for item in value) else [plain(item) for item in value]
    return value


def as_json(event: Event, batch: Sequence[str] = ()) -> dict[str, Any]:
    """Return the line of an event. batch: the requests of the last step before a commit, for its short form."""
    match event:
        case Step():
            return _step_as_json(event)
        case Commit():
            return _commit_as_json(event, batch)
        case Remove(preempted=False):
            return {"remove": event.req_id}
        case Add():
            value = _without_defaults(event)
            return {"add": {**{n: v for n, v in value.items() if n != "extras"}, **event.extras}}
    return {event.kind: _without_defaults(event)}


def _without_defaults(event: Event) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in fields(event):
        value = plain(getattr(event, f.name))
        if f.name not in ("line", "extras") and (f.default is MISSING or value not in (f.default, [])):
            values[f.name] = round(value, 6) if f.name in _TIMES else value
    return values


def _step_as_json(event: Step) -> dict[str, Any]:
    counts = plain(event.counts)
    step: dict[str, Any] = {
        "num_scheduled_tokens": list(event.req_ids)
        if all(n == 1 for n in counts)
        else dict(zip(event.req_ids, counts, strict=True))
    }
    if event.draft_tokens:
        step["draft_tokens"] = {req_id: plain(ids) for req_id, ids in event.draft_tokens.items()}
    if event.pad_to is not None:
        step["pad_to"] = list(event.pad_to)
    if event.order != "given":
        step["order"] = event.order
    for name in ("zero", "copies"):
        if len(getattr(event, name)):
            step[name] = plain(getattr(event, name))
    if event.time is not None:
        step["time"] = round(event.time, 6)
    line: dict[str, Any] = {"step": step}
    if event.tensors:
        line["tensors"] = {name: plain(value) for name, value in event.tensors.items()}
    return line


def _commit_as_json(event: Commit, batch: Sequence[str]) -> dict[str, Any]:
    tokens = {req_id: plain(ids) for req_id, ids in event.tokens.items()}
    line: dict[str, Any] = {"commit": {req_id: ids for req_id, ids in tokens.items() if ids != [] and ids != 0}}
    values = list(tokens.values())
    if list(tokens) == list(batch) and all(ids == 1 or (isinstance(ids, list) and len(ids) == 1) for ids in values):
        line["commit"] = [ids if isinstance(ids, int) else ids[0] for ids in values]
    if event.logprobs:
        line["logprobs"] = {req_id: [round(float(x), 6) for x in values] for req_id, values in event.logprobs.items()}
    line |= {name: round(value, 3) for name in _RUN if (value := getattr(event, name)) is not None}
    return line


# -- from JSON ---------------------------------------------------------------------------------------------------------


class LineParser:
    """Converts the lines after the first to events, in their order. header: the content of the first line."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._batch: list[str] = []

    def event(self, line: Mapping[str, Any], number: int) -> Event:
        """Return the event of a line. Raise PlanError for a line that breaks the format."""
        found = [kind for kind in KINDS if kind in line]
        if len(found) != 1:
            raise PlanError(f"expected one of {', '.join(KINDS)}, got {shown(sorted(line))}")
        (kind,) = found
        beside = {"step": {"tensors"}, "commit": {"logprobs", *_RUN}}.get(kind, set())
        if self._header.version > 1 and (unknown := line.keys() - {kind} - beside):
            raise PlanError(f"unknown key {min(unknown)!r} beside {kind!r}")
        value = line[kind]
        if kind == "commit":
            return self._commit(value, line, number)
        if kind == "remove" and isinstance(value, str):
            value = {"req_id": value}
        owner = KINDS[kind]
        fields = self._fields(kind, value, _READERS[owner])
        if kind == "step":
            fields |= self._step(fields.pop("num_scheduled_tokens"), line.get("tensors", {}))
        elif kind == "add":
            fields["extras"] = {name: fields.pop(name) for name in EXTRAS if name in fields}
        return owner(**fields, line=number)

    def _fields(self, kind: str, value: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PlanError(f"{kind}: expected an object, got {shown(value)}")
        if unknown := value.keys() - readers.keys():
            raise PlanError(f"{kind}: unknown field {min(unknown)!r}; the fields are {', '.join(readers)}")
        if missing := _REQUIRED[kind] - value.keys():
            raise PlanError(f"{kind}: the field {min(missing)!r} is missing")
        return {name: readers[name](f"{kind}: {name}", item, self._header) for name, item in value.items()}

    def _step(self, counts: Any, tensors: Any) -> dict[str, Any]:
        if not isinstance(tensors, dict):
            raise PlanError(f"tensors: expected an object, got {shown(tensors)}")
        if isinstance(counts, list):
            counts = dict.fromkeys(_texts("step: num_scheduled_tokens", counts), 1)
        if not isinstance(counts, dict):
            raise PlanError(f"step: num_scheduled_tokens={shown(counts)}: expected an object, or a list of ids")
        self._batch = list(counts)
        return {"req_ids": self._batch, "counts": _ints("counts", list(counts.values())), "tensors": tensors}

    def _commit(self, value: Any, line: Mapping[str, Any], number: int) -> Commit:
        omitted, logprobs = self._header.token_ids == "omitted", line.get("logprobs", {})
        if isinstance(value, list):
            if len(value) != len(self._batch):
                raise PlanError(f"commit: {len(value)} tokens for the {len(self._batch)} requests of the last step")
            value = {r: token if omitted else [token] for r, token in zip(self._batch, value, strict=True)}
        if not isinstance(value, dict) or not isinstance(logprobs, dict):
            raise PlanError("commit: expected an object of lists, or a list with one token per request")
        tokens = {req_id: _tokens(f"commit: {req_id}", ids, self._header) for req_id, ids in value.items()}
        values = {req_id: _floats(f"logprobs: {req_id}", one) for req_id, one in logprobs.items()}
        times = {name: _time(f"commit: {name}", line.get(name), self._header) for name in _RUN}
        return Commit(tokens=tokens, logprobs=values, line=number, **times)


Reader = Callable[[str, Any, TraceHeader], Any]


def _refused(name: str, value: Any, expected: str) -> PlanError:
    return PlanError(f"{name}={shown(value)}: expected {expected}")


def _ints(name: str, value: Any, *_: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _refused(name, value, "a list of integers")
    if value and not (min(value) >= -INT32_MAX and max(value) <= INT32_MAX):
        raise _refused(name, value, "a list of integers of 32 bits")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise _refused(name, value, "a list of ids, which are strings")
    if len(set(value)) != len(value):
        raise _refused(name, value, "each id once")
    return value


def _floats(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
        raise _refused(name, value, "a list of numbers")
    return value


def _tokens(name: str, value: Any, header: TraceHeader) -> Tokens:
    if header.token_ids != "omitted":
        return _ints(name, value)
    if not is_int32(value, 0) or value > header.max_model_len:
        raise _refused(name, value, f"a number of tokens in [0, max_model_len = {header.max_model_len}]")
    return int(value)


def _blocks(name: str, value: Any, header: TraceHeader) -> list[list[int]]:
    if not isinstance(value, list) or len(value) != len(header.kv_groups):
        raise _refused(name, value, f"a list of block ids for each of the {len(header.kv_groups)} KV groups")
    return [_ints(name, ids) for ids in value]


def _text(name: str, value: Any, _: TraceHeader) -> str:
    if not isinstance(value, str):
        raise _refused(name, value, "a string")
    return value


def _int(name: str, value: Any, _: TraceHeader) -> int:
    if not is_int32(value, 0):
        raise _refused(name, value, "an integer, 0 or more")
    return int(value)


def _signed(name: str, value: Any, _: TraceHeader) -> int:
    if not is_int32(value):
        raise _refused(name, value, "an integer of 32 bits")
    return int(value)


def _time(name: str, value: Any, _: TraceHeader) -> float | None:
    if value is None:
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < MAX_TIME:
        raise _refused(name, value, f"a number below {MAX_TIME:.0e}")
    return value


def _flag(name: str, value: Any, _: TraceHeader) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return value


def _object(name: str, value: Any, _: TraceHeader) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(name, value, "an object")
    return value


def _objects(name: str, value: Any, _: TraceHeader) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _refused(name, value, "a list of objects")
    return value


def _drafts(name: str, value: Any, header: TraceHeader) -> dict[str, Tokens]:
    if value is None:
        return {}
    return {req_id: _tokens(f"{name}[{req_id!r}]", ids, header) for req_id, ids in _object(name, value, header).items()}


def _pads(name: str, value: Any, _: TraceHeader) -> tuple[int | None, int | None] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(n is None or is_int32(n, 0) for n in value):
        raise _refused(name, value, "[tokens, requests], null where an axis is not padded")
    return value[0], value[1]


def _pairs(name: str, value: Any, _: TraceHeader) -> list[list[int]]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise _refused(name, value, "a list of pairs of integers")
    return [_ints(name, pair) for pair in value]


def _rows(name: str, value: Any, _: TraceHeader) -> list[list[int]]:
    if not isinstance(value, list) or len({len(row) if isinstance(row, list) else -1 for row in value}) > 1:
        raise _refused(name, value, "a list of lists of integers, of the same length")
    return [_ints(name, row) for row in value]


def _placed(name: str, value: Any, header: TraceHeader) -> tuple[int, Tokens]:
    if not isinstance(value, list) or len(value) != 2:
        raise _refused(name, value, "[position, ids]")
    return _int(name, value[0], header), _tokens(name, value[1], header)


_REQUIRED = {
    kind: {f.name for f in fields(owner) if f.default is MISSING and f.default_factory is MISSING}
    for kind, owner in KINDS.items()
} | {"step": {"num_scheduled_tokens"}}
_READERS: Mapping[type[Event], Mapping[str, Reader]] = {
    Arrive: {"req_id": _text, "num_prompt_tokens": _int, "time": _time},
    Add: {
        "req_id": _text,
        "prompt_token_ids": _tokens,
        "block_ids": _blocks,
        "output_token_ids": _tokens,
        "num_computed_tokens": _int,
        "prefill_len": _int,
        "lora_id": _int,
        "cache_salt": _text,
        "cache_miss": _text,
        "bidirectional_ranges": _pairs,
        "mrope_positions": _rows,
        "mrope_delta": _signed,
        "sampling_params": _object,
        "lora_request": _object,
        "mm_features": _objects,
        "pooling_params": _object,
    },
    AppendBlocks: {"req_id": _text, "block_ids": _blocks},
    Correct: {
        "req_id": _text,
        "num_tokens": _int,
        "token_ids": _placed,
        "num_computed_tokens": _int,
        "block_ids": _blocks,
    },
    Remove: {"req_id": _text, "preempted": _flag},
    Step: {
        "num_scheduled_tokens": lambda name, value, header: value,
        "draft_tokens": _drafts,
        "pad_to": _pads,
        "order": _text,
        "zero": _ints,
        "copies": _pairs,
        "time": _time,
    },
    Fail: {"error": _text, "time": _time},
    End: {"req_id": _text, "reason": _text, "time": _time, "arrival": _time},
    Restart: {"first_step": _int, "reason": _text},
    Wait: {"req_id": _text, "reason": _text},
}
"""The fields of each kind of event, each with the function that reads and checks its value."""
