"""Proof, step by step, that the cache is used correctly: on a shadow with the writer and content of each slot.

    prepare_inputs(…, check="bounds")   the step's own sums and bounds, O(B)
    prepare_inputs(…, check="full")    every tensor (`foreword.batch.validate`), and every slot the step reads or writes

A key and value depend on the token at their position and on all tokens before it. So the shadow holds for each slot
its writer and a fingerprint of the tokens up to there, and a step is right if

    each slot it writes has one writer, and no other live request can see its block
    each slot it reads was written, by the request itself, or before its admission with the same tokens
    no freed block is still seen by the request that had it
    the block of a recurrent state is seen by its request alone

Tokens that are computed at admission (num_computed_tokens > 0) are declared as shared: what was written in their slots
must have these tokens, and slots never written count as filled by the caller, since the checker cannot see what was
written outside its steps. `CacheChecker.share` declares more.

A step may be prepared again before it ran. Where the same tokens of the same requests are prepared MOST_REPEATS times
without a commit, a RuntimeWarning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword.arrays import I32, I64, U64, AnyArray, Bools
from foreword.batch.proof.spec.step import slots
from foreword.batch.proof.validator import validate
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.plan import Check
from foreword.errors import PlanError
from foreword.seeds import STRIDE, mix64

NO_WRITER = 0  # the writer of a slot never written
MOST_REPEATS = 3
UNKNOWN = np.uint64(1)  # the fingerprint of a token whose id is not known here


def run_check(batch: BatchTensors, level: Check) -> None:
    """PlanError for the first violation in a batch just prepared or resolved; the batch must not be run then."""
    if level == "bounds":
        check_bounds(batch)
    elif level == "full":
        validate(batch)
        CacheChecker.of(batch.states).check(batch)
    else:
        raise PlanError(f"check={level!r}: must be 'off', 'bounds' or 'full'")


def check_bounds(batch: BatchTensors) -> None:
    """O(B): offsets grow and end where they must, lengths add up, rows and blocks are within their capacity."""
    states = batch.states
    B, rows = batch.num_reqs, batch.idx_mapping.astype(np.int64)
    n, k, ends = batch.num_scheduled_tokens, batch.num_draft_tokens, batch.seq_lens[:B]
    cancelled = batch.row_generation == -1
    within = (rows >= 0) & (rows < states.max_num_reqs)
    safe = np.where(within, rows, 0)

    def require(ok: Bools, tensor: str, expected: Any, got: AnyArray) -> None:
        if ok.all():
            return
        b = int(np.argmin(ok))
        row = int(safe[b]) if b < B else -1
        want = np.broadcast_to(expected, got.shape)[b].item() if not isinstance(expected, str) else expected
        raise PlanError("a step's sums do not add up", step=batch.step, tensor=tensor, index=b, expected=want,
                        got=got[b].item(), request=states._find_req_id(row))  # fmt: skip

    require(within & (states.live[safe] | cancelled), "idx_mapping", "a live row", rows)
    require(n >= 1, "num_scheduled_tokens", "1 or more", n)
    require((k >= 0) & (k <= states.max_num_draft_tokens) & (k < n), "num_draft_tokens", "fewer than scheduled", k)
    for name, offsets, parts in (
        ("query_start_loc", batch.query_start_loc[: B + 1], n),
        ("cu_num_logits", batch.cu_num_logits, k + 1),
        ("cu_num_draft_tokens", batch.cu_num_draft_tokens, k),
    ):
        sums = np.concatenate(([0], np.cumsum(parts)))
        require(offsets == sums, name, sums, offsets)
    require(
        batch.query_start_loc[B:] == batch.num_tokens, "query_start_loc", batch.num_tokens, batch.query_start_loc[B:]
    )
    require(ends == batch.num_computed_tokens + n, "seq_lens", batch.num_computed_tokens + n, ends)
    require(ends <= states.max_model_len, "seq_lens", states.max_model_len, ends)
    for g, table in enumerate(states.block_tables):
        held, need = table.num_blocks[safe], -(-ends // table.tokens_per_block)
        require(cancelled | ((need <= held) & (held <= table.width)), f"num_blocks[{g}]", need, held)


@dataclass(slots=True)
class _Tenant:
    """A request in its row, as the shadow has it."""

    name: str
    serial: int
    brought: int | None = None  # tokens that were computed when it was first seen
    shared: int = 0  # tokens declared by `share`
    seen: list[I32] = field(default_factory=list)  # its blocks at the last check, per group


class CacheChecker:
    """The shadow of one `RequestStates`' cache, made by the first `prepare_inputs(check="full")`; see `of`.

    Use "full" for every step from the first: after unchecked steps, what is live counts as correct.
    """

    @staticmethod
    def of(states: RequestStates) -> CacheChecker:
        """The checker that follows these states, made on first use."""
        found = (observer for observer in states.observers if isinstance(observer, CacheChecker))
        return next(found, None) or CacheChecker(states)

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._serial = NO_WRITER
        self._names: dict[int, str] = {}
        self._tenants: dict[int, _Tenant] = {}
        self._shadows = [_Shadow(t.group.block_size) for t in states.block_tables]
        self._freed: list[set[int]] = [set() for _ in states.block_tables]
        self._last_step = -1
        self._last: BatchTensors | None = None  # the batch recorded last
        self._first_seen: list[_Tenant] = []  # in that batch
        self._tokens: list[list[int]] = []  # rows, computed and scheduled tokens of that batch
        self._repeats = 1
        for req_id in states.req_ids:
            self.filled(states.row_of(req_id))
        states.observers.append(self)

    # -- called by the states --------------------------------------------------------------------------------------

    def filled(self, row: int) -> None:
        """A request was admitted to the row."""
        self._serial += 1
        name = self._states.req_id_of(row)
        self._tenants[row] = _Tenant(name, self._serial)
        self._names[self._serial] = name

    def freed(self, row: int) -> None:
        """The row's request leaves."""
        self._tenants.pop(row, None)

    def exchanged(self, a: int, b: int) -> None:
        """Two rows changed places."""
        moved = {b: self._tenants.pop(a, None), a: self._tenants.pop(b, None)}
        self._tenants.update({row: tenant for row, tenant in moved.items() if tenant is not None})

    # -- called by the cache -----------------------------------------------------------------------------------------

    def share(self, req_id: str, num_tokens: int) -> None:
        """Declare that the keys and values of the request's first tokens were written outside the checked steps."""
        self._tenants[self._states.row_of(req_id)].shared = num_tokens

    def blocks_freed(self, block_ids: Iterable[int], group: int = 0) -> None:
        """The pool freed these blocks: the requests that had them must not see them any more."""
        self._freed[group].update(int(block) for block in block_ids)

    def close(self) -> None:
        """Stop following the states."""
        self._states.observers.remove(self)

    # -- the check -----------------------------------------------------------------------------------------------------

    def check(self, batch: BatchTensors) -> None:
        """Compare a step with the shadow, then record its writes there. PlanError for the first violation.

        A step prepared before the samples it needs were known is checked when it is resolved. A step that is resolved
        or prepared again before it ran replaces what was recorded of it: its copies are made once.
        """
        if self._last is not None and self._last.buffers is batch.buffers and self._last.is_pending:
            for shadow in self._shadows:
                shadow.undo()
            for tenant in self._first_seen:
                tenant.brought = None
            self._count_repeats(batch)
        if batch.step > self._last_step + 1:  # steps were not checked
            self._shadows = [_Shadow(t.group.block_size) for t in self._states.block_tables]
            for tenant in self._tenants.values():
                tenant.brought, tenant.seen = None, []
        self._last_step = max(self._last_step, batch.step)
        for g, table in enumerate(self._states.block_tables):
            self._check_freed(batch, g, table)
        if not batch.is_resolved:
            return
        self._last, self._first_seen = batch, []
        self._tokens = _tokens_of(batch)
        alive = [b for b in range(batch.num_reqs) if batch.row_generation[b] != -1]
        for shadow in self._shadows:
            shadow.keep()
        for g, table in enumerate(self._states.block_tables):
            if batch.block_ops:
                self._shadows[g].copy(batch.block_ops.copies)
            if table.group.recurrent:  # no token has a slot
                self._check_states(batch, g, table)
                continue
            writers = self._check_writes(batch, g, table, alive)
            for b in alive:
                self._check_reads(batch, g, table, b)
            self._write(batch, g, alive, writers)
        for b in alive:
            tenant = self._tenants[int(batch.idx_mapping[b])]
            if tenant.brought is None:
                tenant.brought = int(batch.num_computed_tokens[b])
                self._first_seen.append(tenant)

    def _count_repeats(self, batch: BatchTensors) -> None:
        """Warn once where a step is prepared again and again without a commit."""
        if batch is self._last:  # resolved
            return
        self._repeats = self._repeats + 1 if batch.num_reqs and _tokens_of(batch) == self._tokens else 1
        if self._repeats == MOST_REPEATS:
            warnings.warn(
                f"step {batch.step} has the same tokens as the {MOST_REPEATS - 1} steps before, none of which was "
                "committed: call states.commit(batch, sampled) after each step that ran",
                RuntimeWarning,
                stacklevel=4,
            )

    def _check_freed(self, batch: BatchTensors, g: int, table: BlockTable) -> None:
        """An entry of the last check must not have been freed since; a new entry is an allocation."""
        freed, fresh = self._freed[g], set[int]()
        for row, tenant in self._tenants.items():
            now, first = table.table[row, : table.num_blocks[row]], self._first_visible(row, table)
            before = tenant.seen[g] if g < len(tenant.seen) else now[:0]
            common = min(len(before), len(now))
            old = np.zeros(len(now), np.bool_)
            old[:common] = now[:common] == before[:common]
            for i in np.flatnonzero(old[first:]).tolist() if freed else ():
                if int(now[first + i]) in freed:
                    raise PlanError("a freed block is still seen by the request that had it",
                                    step=batch.step, request=tenant.name, tensor=f"states.block_table[{g}]",
                                    index=(row, first + i), expected="a block it owns",
                                    got=int(now[first + i]))  # fmt: skip
            fresh.update(now[~old].tolist())
            tenant.seen[g : g + 1] = [now.copy()]
        freed -= fresh

    def _first_visible(self, row: int, table: BlockTable) -> int:
        """The first entry that a token from num_computed on can see."""
        window = table.group.sliding_window
        low = 0 if window is None else int(self._states.num_computed_tokens[row]) - window + 1
        return max(low, 0) // table.tokens_per_block

    def _check_writes(self, batch: BatchTensors, g: int, table: BlockTable, alive: list[int]) -> I64:
        """[R] serials of the rows. No slot twice, and no slot in a block that another live request sees."""
        slot_mapping = batch.slot_mapping[g][: batch.num_tokens]
        writes = np.flatnonzero(slot_mapping >= 0)
        written, first = np.unique(slot_mapping[writes], return_index=True)
        if len(written) < len(writes):
            t = int(np.setdiff1d(np.arange(len(writes)), first)[0])
            self._refuse("two tokens of a step write one slot", batch, g, int(writes[t]), "a slot of its own")
        viewers: dict[int, set[int]] = {}
        for row in self._tenants:
            first_entry = self._first_visible(row, table)
            for block in set(table.table[row, first_entry : table.num_blocks[row]].tolist()):
                viewers.setdefault(block, set()).add(row)
        for t, block in zip(writes.tolist(), (slot_mapping[writes] // table.group.block_size).tolist(), strict=True):
            row = int(batch.idx_mapping[batch.req_indices[t]])
            others = viewers.get(block, set()) - {row}
            if others:
                name = self._tenants[min(others)].name
                self._refuse(
                    f"a write to block {block}, which request {name!r} sees", batch, g, t, "a block of its own"
                )
        serials = np.zeros(self._states.max_num_reqs, np.int64)
        for b in alive:
            row = int(batch.idx_mapping[b])
            serials[row] = self._tenants[row].serial
        return serials

    def _check_states(self, batch: BatchTensors, g: int, table: BlockTable) -> None:
        """Every step of a request overwrites its state, so no two live requests have theirs in one block."""
        owners: dict[int, _Tenant] = {}
        for row, tenant in self._tenants.items():
            block = int(table.table[row, 0])
            if table.num_blocks[row] and owners.setdefault(block, tenant) is not tenant:
                raise PlanError("two requests have their states in one block", step=batch.step, request=tenant.name,
                                tensor=f"states.block_table[{g}]", index=(row, 0),
                                expected=f"a block that request {owners[block].name!r} does not have",
                                got=block)  # fmt: skip

    def _refuse(self, message: str, batch: BatchTensors, g: int, t: int, expected: str) -> None:
        row = int(batch.idx_mapping[batch.req_indices[t]])
        raise PlanError(message, step=batch.step, request=self._tenants[row].name, tensor=f"slot_mapping[{g}]", index=t,
                        expected=expected, got=int(batch.slot_mapping[g][t]))  # fmt: skip

    def _check_reads(self, batch: BatchTensors, g: int, table: BlockTable, b: int) -> None:
        """The context of request b: every slot that its first token sees."""
        row, c = int(batch.idx_mapping[b]), int(batch.num_computed_tokens[b])
        tenant, window = self._tenants[row], table.group.sliding_window
        positions = np.arange(0 if window is None else max(c - window + 1, 0), c)
        where = slots(table, np.full(len(positions), row), positions)
        positions, where = positions[where >= 0], where[where >= 0]
        writer, content = self._shadows[g].read(where)
        wanted = self._fingerprints(batch, b)[positions]
        if tenant.brought is None:
            given = (writer == NO_WRITER) | (positions < tenant.shared)
            self._shadows[g].write(where[given], tenant.serial, wanted[given])
            writer, content = self._shadows[g].read(where)
        brought = c if tenant.brought is None else max(tenant.brought, tenant.shared)
        strange = (writer != tenant.serial) & (positions >= brought)
        other = (content != wanted) & (content != UNKNOWN) & (wanted != UNKNOWN)
        if not (strange | other).any():
            return
        i = int(np.argmax(strange | other))
        if writer[i] == NO_WRITER:
            got = "nothing was written there"
        else:
            got = f"written by request {self._names[int(writer[i])]!r}" + (", with other tokens" if other[i] else "")
        p = int(positions[i])
        raise PlanError(f"a read of slot {int(where[i])}, which does not hold the request's tokens", step=batch.step,
                        request=tenant.name, tensor=f"block_table[{g}]", index=(b, p // table.tokens_per_block),
                        expected=f"the key and value of position {p}", got=got)  # fmt: skip

    def _write(self, batch: BatchTensors, g: int, alive: list[int], serials: I64) -> None:
        for b in alive:
            tokens = slice(int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1]))
            where, positions = batch.slot_mapping[g][tokens], batch.positions[tokens]
            owned = where >= 0
            prints = self._fingerprints(batch, b)[positions[owned]]
            self._shadows[g].write(where[owned], int(serials[batch.idx_mapping[b]]), prints)

    def _fingerprints(self, batch: BatchTensors, b: int) -> U64:
        """[seq_lens[b]] of all tokens up to each position; UNKNOWN from the first draft whose id is not known."""
        states, row, end = self._states, int(batch.idx_mapping[b]), int(batch.seq_lens[b])
        tokens = states.token_ids[row, :end].astype(np.uint64)
        mixed = _mix((np.arange(end, dtype=np.uint64) << np.uint64(32)) | tokens)
        prints: U64 = np.cumsum(mixed, dtype=np.uint64) + _mix(states.lora_id[row : row + 1].astype(np.uint64))
        drafts = batch.draft_token_ids[batch.cu_num_draft_tokens[b] : batch.cu_num_draft_tokens[b + 1]]
        if (drafts < 0).any():
            prints[end - len(drafts) + int(np.argmax(drafts < 0)) :] = UNKNOWN
        return prints


def _tokens_of(batch: BatchTensors) -> list[list[int]]:
    """Rows, computed and scheduled tokens of a step: equal for steps that compute the same tokens."""
    return [x.tolist() for x in (batch.idx_mapping, batch.num_computed_tokens, batch.num_scheduled_tokens)]


class _Shadow:
    """Writer and fingerprint of each slot of one group. Only blocks that were touched take memory.

    `undo` takes back all changes since `keep`.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._before: list[tuple[I64, I64, U64]] = []  # blocks, their writers and contents before each change
        self._index: dict[int, int] = {}
        self._writer = np.zeros((0, block_size), np.int64)
        self._content = np.zeros((0, block_size), np.uint64)

    def _places(self, blocks: I64) -> I64:
        """Where these blocks are kept, made when first touched."""
        distinct, inverse = np.unique(blocks, return_inverse=True)
        places = np.array([self._index.setdefault(block, len(self._index)) for block in distinct.tolist()], np.int64)
        if len(self._index) > len(self._writer):
            more = max(len(self._index), 2 * len(self._writer)) - len(self._writer)
            self._writer = np.concatenate((self._writer, np.zeros((more, self._size), np.int64)))
            self._content = np.concatenate((self._content, np.zeros((more, self._size), np.uint64)))
        return places[inverse]

    def read(self, where: I64) -> tuple[I64, U64]:
        places, offsets = self._places(where // self._size), where % self._size
        return self._writer[places, offsets], self._content[places, offsets]

    def keep(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        while self._before:
            places, writer, content = self._before.pop()
            self._writer[places], self._content[places] = writer, content

    def _record(self, places: I64) -> None:
        self._before.append((places, self._writer[places], self._content[places]))

    def write(self, where: I64, writer: int, content: U64) -> None:
        places, offsets = self._places(where // self._size), where % self._size
        self._record(places)
        self._writer[places, offsets] = writer
        self._content[places, offsets] = content

    def copy(self, pairs: I32) -> None:
        """Blocks copied, all of them read before any is written."""
        sources, targets = (self._places(blocks.astype(np.int64)) for blocks in (pairs[:, 0], pairs[:, 1]))
        self._record(targets)
        self._writer[targets] = self._writer[sources]
        self._content[targets] = self._content[sources]


def _mix(values: U64) -> U64:
    """Spread over 64 bits, so that sums of different tokens differ."""
    mixed: U64 = mix64(values + np.uint64(STRIDE))
    return mixed
