"""Capture what happens to an engine's states, step by step, as small values that are cheap to keep and are encoded
later.

The values are not to be changed; their classes are not frozen, for speed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreword.arrays import I32, Bools
from foreword.batch import BlockOps, InputBatch, MultiModalFeature, PoolingParams, RequestStates, SamplingParams
from foreword.batch import LoraRequest as Lora


@dataclass(slots=True, eq=False)
class Filled:
    """A request entered a row. blocks: one array per KV group. ranges: `NewRequest.bidirectional_ranges`.

    rotary: int32 [dims, n], its rotary positions. rope_delta: the number that later tokens add to their positions.
    """

    row: int
    req_id: str
    tokens: I32
    prompt_len: int
    prefill_len: int
    num_computed_tokens: int
    blocks: list[I32]
    lora_id: int = 0
    lora: Lora | None = None
    cache_salt: str | None = None
    cache_miss: str = ""
    sampling: SamplingParams | None = None
    pooling: PoolingParams | None = None
    features: Sequence[MultiModalFeature] = ()
    ranges: I32 | None = None
    rotary: I32 | None = None
    rope_delta: int = 0

    @property
    def nbytes(self) -> int:
        """The memory of its arrays."""
        return self.tokens.nbytes + sum(ids.nbytes for ids in self.blocks)


@dataclass(slots=True, eq=False)
class Freed:
    """The request of a row left it."""

    row: int
    req_id: str
    preempted: bool = False


@dataclass(slots=True, eq=False)
class Exchanged:
    """Two rows changed places."""

    a: int
    b: int


Growth = Sequence[tuple[I32, I32, I32]]
"""For each KV group: the rows with new blocks, the numbers of new blocks, and their ids row by row. Empty if no row has
any."""


@dataclass(slots=True, eq=False)
class Grown:
    """Rows have new blocks."""

    grown: Growth


@dataclass(slots=True, eq=False)
class Planned:
    """A prepared step, with the new blocks of its rows. samples: of the requests whose
    sample counts; None: of all. tensors: copies.
    """

    rows: I32
    counts: I32
    num_drafts: I32 | None
    draft_ids: I32
    pad_to: tuple[int, int] | None
    block_ops: BlockOps
    grown: Growth
    samples: Bools | None
    tensors: Mapping[str, Any]
    time: float | None


@dataclass(slots=True, eq=False)
class Repeated:
    """A step like the one before: the same requests in the same order, one token each, without drafts."""

    time: float | None
    grown: Growth


@dataclass(slots=True, eq=False)
class Sampled:
    """The samples of the last step, int32 [B] or [B, D + 1] padded with −1, or by request.

    logprobs: one per sample, by batch index.
    """

    token_ids: I32 | Mapping[str, Sequence[int]]
    logprobs: Mapping[int, list[float]]
    host_us: float | None = None
    model_ms: float | None = None


@dataclass(slots=True, eq=False)
class Failed:
    """The last step failed."""

    error: str
    time: float | None


@dataclass(slots=True, eq=False)
class Arrived:
    """A request entered the engine."""

    req_id: str
    num_prompt_tokens: int
    time: float | None


@dataclass(slots=True, eq=False)
class Ended:
    """A request ended."""

    req_id: str
    reason: str
    time: float | None
    arrival: float | None


@dataclass(slots=True, eq=False)
class Waited:
    """From the next step on, the named request is the first that waits, for this reason; empty: none waits."""

    req_id: str
    reason: str


Captured = Filled | Freed | Exchanged | Grown | Planned | Repeated | Sampled | Failed | Arrived | Ended | Waited


NO_GROWTH = (np.zeros(0, np.int32),) * 3


class Capture:
    """Observes the rows of states, and collects what happens until `take` is called.

    `step` is called for each prepared step, before the states change again, and `commit` after its commit. A step
    costs a few array operations on the requests of the step, and memory in proportion to them; one that only repeats
    the step before keeps the rows with new blocks.
    nbytes: approximate memory of the collected values.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._held = [np.zeros(states.max_num_reqs, np.int32) for _ in states.block_tables]
        self._kept: list[Captured] = []
        self._identities: dict[int, tuple[Lora | None, str | None, str]] = {}  # only of rows that have any of them
        self.nbytes = 0
        states.observers.append(self)

    def close(self) -> None:
        """Stop following the states."""
        if self in self._states.observers:
            self._states.observers.remove(self)

    def take(self) -> list[Captured]:
        """Return what happened since the last call."""
        kept, self._kept, self.nbytes = self._kept, [], 0
        return kept

    def snapshot(self) -> list[Filled]:
        """Return all requests that are in a row, in their present state. Their new blocks are also collected."""
        states = self._states
        rows = [states.row_of(req_id) for req_id in states.req_ids]
        if grown := self._growth(np.array(rows, np.int32)):
            self._kept.append(Grown(grown))
        return [self._filled(row, req_id) for row, req_id in zip(rows, states.req_ids, strict=True)]

    def identify(self, row: int, lora: Lora | None, cache_salt: str | None, cache_miss: str = "") -> None:
        """Add data that the states do not have to a request that was admitted to a row since the last step: the name
        and path of its adapter, the salt of its prefix, and why no more of its prompt was reused.
        """
        if lora is not None or cache_salt is not None or cache_miss:
            self._identities[row] = lora, cache_salt, cache_miss
        for event in reversed(self._kept):
            if isinstance(event, Filled) and event.row == row:
                event.lora, event.cache_salt, event.cache_miss = lora, cache_salt, cache_miss
                break

    # -- called by the states ------------------------------------------------------------------------------------------

    def filled(self, row: int) -> None:
        """A request was admitted."""
        for held, table in zip(self._held, self._states.block_tables, strict=True):
            held[row] = table.num_blocks[row]
        added = self._filled(row, self._states.req_id_of(row))
        self.nbytes += added.nbytes
        self._kept.append(added)

    def freed(self, row: int) -> None:
        """A request is about to be removed."""
        self._identities.pop(row, None)
        self._kept.append(Freed(row, self._states.req_id_of(row)))

    def exchanged(self, a: int, b: int) -> None:
        """Two rows changed places."""
        for held in self._held:
            held[[a, b]] = held[[b, a]]
        pair = self._identities.pop(a, None), self._identities.pop(b, None)
        self._identities |= {row: given for row, given in zip((b, a), pair, strict=True) if given is not None}
        self._kept.append(Exchanged(a, b))

    # -- called for each step ------------------------------------------------------------------------------------------

    def step(
        self,
        batch: InputBatch,
        *,
        preempted: Collection[str] = (),
        tensors: Mapping[str, Any] | None = None,
        time: float | None = None,
    ) -> None:
        """Record a step that was just prepared. preempted: the requests that left and will be admitted again.

        tensors: as `TraceWriter.step` takes them; the arrays must not change later.
        """
        if preempted:
            self._kept = [
                replace(event, preempted=True) if isinstance(event, Freed) and event.req_id in preempted else event
                for event in self._kept
            ]
        if self._states.extras.mrope_positions:
            self._take_rotary()
        states, rows, num_drafts = self._states, batch.idx_mapping.copy(), None
        if len(batch.draft_token_ids):
            num_drafts = batch.num_draft_tokens.copy()
        samples = None
        if batch.is_prefilling.any():
            ends = batch.num_computed_tokens + batch.num_scheduled_tokens - batch.num_draft_tokens
            samples = ends >= states.num_tokens[rows] + states.num_placeholders[rows]
        self.nbytes += 64 + 16 * len(rows)
        padded = batch.num_tokens_padded, batch.num_reqs_padded
        self._kept.append(
            Planned(
                rows,
                batch.num_scheduled_tokens.copy(),
                num_drafts,
                batch.draft_token_ids.copy(),
                padded if padded != (batch.num_tokens, batch.num_reqs) else None,
                batch.block_ops,
                self._growth(rows),
                samples,
                tensors or {},
                time,
            )
        )

    def repeat(self, rows: I32 | None, time: float | None = None) -> None:
        """Record a step of these rows that repeats the one before, see `Repeated`. None: no row got blocks."""
        self._kept.append(Repeated(time, () if rows is None else self._growth(rows)))

    def commit(
        self,
        sampled: I32 | Mapping[str, Sequence[int]],
        logprobs: Mapping[int, list[float]] | None = None,
        host_us: float | None = None,
        model_ms: float | None = None,
    ) -> None:
        """Record the samples of the last step. The arrays must not change later."""
        self._kept.append(Sampled(sampled, logprobs or {}, host_us, model_ms))

    def fail(self, error: str, time: float | None = None) -> None:
        """Record that the last step failed. The requests that left since count as preempted."""
        back: list[Captured] = [replace(e, preempted=True) if isinstance(e, Freed) else e for e in self._kept]
        self._kept = [Failed(error, time), *back]

    def arrive(self, req_id: str, num_prompt_tokens: int, time: float | None = None) -> None:
        """A request entered the engine."""
        self._kept.append(Arrived(req_id, num_prompt_tokens, time))

    def end(self, req_id: str, reason: str, time: float | None = None, arrival: float | None = None) -> None:
        """A request ended."""
        self._kept.append(Ended(req_id, reason, time, arrival))

    def _filled(self, row: int, req_id: str) -> Filled:
        found = filled(self._states, row, req_id)
        if row in self._identities:
            found.lora, found.cache_salt, found.cache_miss = self._identities[row]
        return found

    def _take_rotary(self) -> None:
        """Add the rotary positions that requests were given after their admission."""
        states = self._states
        for event in self._kept:
            if isinstance(event, Filled) and event.rotary is None and event.req_id in states:
                row = states.row_of(event.req_id)
                event.rotary, event.rope_delta = states.extras.mrope_positions.get(row), int(states.rope_delta[row])

    def wait(self, req_id: str, reason: str) -> None:
        """From the next step on, this request is the first that waits."""
        self._kept.append(Waited(req_id, reason))

    def _growth(self, rows: I32) -> Growth:
        """Return the blocks that these rows got since the last call."""
        grown: list[tuple[I32, I32, I32]] = []
        found = False
        for held, table in zip(self._held, self._states.block_tables, strict=True):
            count = table.num_blocks.take(rows)
            more = count - held.take(rows)
            at = more.nonzero()[0]
            if not at.size:
                grown.append(NO_GROWTH)
                continue
            found = True
            new, counts, last = rows.take(at), more.take(at), count.take(at) - 1
            held[new] = last + 1
            if int(counts.max()) == 1:
                grown.append((new, counts, table.table[new, last]))
                continue
            before = np.repeat(np.cumsum(counts, dtype=np.int32) - 1 - last, counts)
            ids = table.table[np.repeat(new, counts), np.arange(len(before), dtype=np.int32) - before]
            grown.append((new, counts, ids))
        return grown if found else ()


def filled(states: RequestStates, row: int, req_id: str) -> Filled:
    """Return the request of a row as it is now."""
    lora_id = int(states.lora_id[row])
    return Filled(
        row,
        req_id,
        states.token_ids[row, : states.num_tokens[row]].copy(),
        int(states.prompt_len[row]),
        int(states.prefill_len[row]),
        int(states.num_computed_tokens[row]),
        [t.table[row, : t.num_blocks[row]].copy() for t in states.block_tables],
        lora_id,
        states.loras.request(lora_id),
        None,
        "",
        states.sampling.params.get(row),
        states.extras.pooling_params.get(row),
        states.extras.mm_features.get(row, ()),
        states.extras.bidirectional_ranges.get(row),
        states.extras.mrope_positions.get(row),
        int(states.rope_delta[row]),
    )
