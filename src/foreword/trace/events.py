"""The events of a trace as values, one class per kind of line. docs/conformance.md has the format.

Values that are written may hold NumPy arrays; values that are read hold lists. If token ids are omitted, the length of
a list replaces the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from foreword.arrays import AnyArray, Ints

Ids = Sequence[int] | Ints
Tokens = Ids | int
Tensor = AnyArray | Sequence[Any] | int | str
"""A tensor as an array, or as nested lists; one per KV group where the tensor exists per group."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Event:
    """One line after the first. kind: its key. line: its number in the file that it was read from, else 0."""

    kind: ClassVar[str]
    line: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Arrive(Event):
    """A request arrived and waits. Times are seconds since the trace's ``started``."""

    kind = "arrive"
    req_id: str
    num_prompt_tokens: int
    time: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Add(Event):
    """A request is assigned a row, new or resumed: the fields of `NewRequest`.

    The blocks that hold the first num_computed_tokens positions were reused from the cache. prefill_len: the number of
    tokens that had to be computed before its first sample; None: all known tokens. It is smaller if the request was in
    progress when the trace began.
    cache_miss: why the cache had no more of its prompt, such as "differs at 12"; "" if it had all, or if not known.
    bidirectional_ranges: ranges [start, stop) of positions of the prompt whose tokens see each other.
    mrope_positions: [dims, n], the rotary positions of its first n tokens; mrope_delta: the number that later tokens
    add to their positions. extras: its sampling_params, lora_request, mm_features and pooling_params as JSON, as far as
    it has them.
    """

    kind = "add"
    req_id: str
    prompt_token_ids: Tokens
    block_ids: Sequence[Ids]
    output_token_ids: Tokens = ()
    num_computed_tokens: int = 0
    prefill_len: int | None = None
    lora_id: int = 0
    cache_salt: str | None = None
    cache_miss: str = ""
    bidirectional_ranges: Sequence[Ids] | Ints = ()
    mrope_positions: Sequence[Ids] | Ints = ()
    mrope_delta: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AppendBlocks(Event):
    """Blocks are appended to a request, one list per KV group."""

    kind = "append_blocks"
    req_id: str
    block_ids: Sequence[Ids]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Correct(Event):
    """A scheduler corrects a request between two steps. A field that is None does not change.

    num_tokens: outputs from this position on are removed. token_ids: (position, ids) that replace known tokens or
    follow them. num_computed_tokens: the new count. block_ids: replaces all of its blocks. The changes are made in this
    order.
    """

    kind = "correct"
    req_id: str
    num_tokens: int | None = None
    token_ids: tuple[int, Tokens] | None = None
    num_computed_tokens: int | None = None
    block_ids: Sequence[Ids] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Remove(Event):
    """A request leaves its row. preempted: whether it will be added again; otherwise it has ended."""

    kind = "remove"
    req_id: str
    preempted: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step(Event):
    """One step: its requests in batch order, and their tokens, drafts included.

    draft_tokens: the drafts of the requests that have some. pad_to: (tokens, requests), None for an axis without
    padding.
    zero: blocks that are zeroed before the step. copies: (from, to), blocks that are copied before it.
    tensors: the tensors that the engine prepared. time: the start of the step.
    """

    kind = "step"
    req_ids: Sequence[str]
    counts: Ids
    draft_tokens: Mapping[str, Tokens] = field(default_factory=dict)
    pad_to: tuple[int | None, int | None] | None = None
    order: str = "given"
    zero: Ids = ()
    copies: Sequence[Ids] | Ints = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    time: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Commit(Event):
    """The samples of the last step: with drafts, the accepted drafts and one more token. A request may be absent.

    logprobs: their log-probabilities, where they are known. model_ms: the model's run, milliseconds. host_us: the rest
    of the step, microseconds.
    """

    kind = "commit"
    tokens: Mapping[str, Tokens]
    logprobs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    model_ms: float | None = None
    host_us: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fail(Event):
    """The last step failed, and has no commit."""

    kind = "fail"
    error: str
    time: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class End(Event):
    """A request ended. It has left its row, or leaves it with the next remove.

    arrival: the time of its arrival; it enters the engine later, between two steps.
    """

    kind = "end"
    req_id: str
    reason: str
    time: float | None = None
    arrival: float | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Restart(Event):
    """Events are missing here: every request has left its row, and those in progress are added again.

    first_step: the number of the next step.
    """

    kind = "restart"
    first_step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wait(Event):
    """From the next step on, requests wait for a row. The event has the first of them and the reason, a line of
    `foreword.scheduler.Reason`. Both are empty if no request waits.
    """

    kind = "wait"
    req_id: str = ""
    reason: str = ""


KINDS: Mapping[str, type[Event]] = {
    kind.kind: kind for kind in (Add, AppendBlocks, Arrive, Commit, Correct, End, Fail, Remove, Restart, Step, Wait)
}


def count_of(tokens: Tokens) -> int:
    """Return the number of some tokens."""
    return tokens if isinstance(tokens, int) else len(tokens)


def ids_of(tokens: Tokens) -> Ids:
    """Return token ids; zeros for omitted ones."""
    return np.zeros(tokens, np.int32) if isinstance(tokens, int) else tokens
