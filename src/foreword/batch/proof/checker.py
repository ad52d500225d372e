"""Proof, step by step, that the cache is used correctly, from the writer and content of each slot.

    prepare_inputs(…, check="bounds")   the step's own sums and bounds, O(B)
    prepare_inputs(…, check="full")    every tensor (`foreword.batch.validate`), and every slot the step reads or writes

`foreword.batch.proof.contents` has the writer of each slot and a fingerprint of its content. A step is right if

    each slot it writes has one writer, and no other live request can see its block
    each slot it reads was written, by the request itself, or before its admission with the same tokens
    no freed block is still seen by the request that had it
    the blocks of a recurrent state are seen by its request alone

Tokens that are computed at admission (num_computed_tokens > 0) are declared as shared: what was written in their slots
must have these tokens, and slots never written count as filled by the caller, since the checker cannot see what was
written outside its steps. `CacheChecker.share` declares more.

A step may be prepared again before it ran. Where the same tokens of the same requests are prepared MOST_REPEATS times
without a commit, a RuntimeWarning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Bools
from foreword.batch.proof.contents import CacheContents, SlotFault
from foreword.batch.proof.validator import validate
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.plan import Check
from foreword.errors import PlanError

MOST_REPEATS = 3


def run_check(batch: BatchTensors, level: Check) -> None:
    """Raise PlanError for the first violation in a batch just prepared or resolved. Do not run the batch then."""
    if level == "bounds":
        check_bounds(batch)
    elif level == "full":
        validate(batch)
        CacheChecker.of(batch.states).check(batch)
    else:
        raise PlanError(f"check={level!r}: must be 'off', 'bounds' or 'full'")


def check_bounds(batch: BatchTensors) -> None:
    """Check in O(B) that offsets grow and end where they must, lengths add up, rows and blocks are within their
    capacity.
    """
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


class CacheChecker:
    """The checks of the cache of one `RequestStates`. The first `prepare_inputs(check="full")` creates it; see `of`.

    Use "full" for every step from the first: after unchecked steps, what is live counts as correct.
    """

    @staticmethod
    def of(states: RequestStates) -> CacheChecker:
        """Return the checker that follows these states; create it on first use."""
        found = (observer for observer in states.observers if isinstance(observer, CacheChecker))
        return next(found, None) or CacheChecker(states)

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self.contents = CacheContents(states, None, strict=True)
        self._freed = [_FreedBlocks(table) for table in states.block_tables]
        self._last_step = -1
        self._last: BatchTensors | None = None  # the batch recorded last
        self._tokens: list[list[int]] = []  # rows, computed and scheduled tokens of that batch
        self._repeats = 1
        states.observers.append(self)

    # -- called by the states --------------------------------------------------------------------------------------

    def filled(self, row: int) -> None:
        """Follow the admission of a request to the row."""
        for freed in self._freed:
            freed.num_seen[row] = 0

    def freed(self, row: int) -> None:
        """Follow the removal of the row's request."""

    def exchanged(self, a: int, b: int) -> None:
        """Follow the exchange of two rows."""
        for freed in self._freed:
            for array in (freed.seen, freed.num_seen):
                array[[a, b]] = array[[b, a]]

    # -- called by the cache -----------------------------------------------------------------------------------------

    def share(self, req_id: str, num_tokens: int) -> None:
        """Declare that the keys and values of the request's first tokens were written outside the checked steps."""
        self.contents.share(req_id, num_tokens)

    def bring(self, blocks: I32, group: int) -> None:
        """Declare that these blocks of a KV group, which no request has, were written outside the checked steps."""
        self.contents.bring(blocks, group)

    def blocks_freed(self, block_ids: Iterable[int], group: int = 0) -> None:
        """Record that the pool freed these blocks, which the requests that had them must not see any more."""
        self._freed[group].add(block_ids)

    def close(self) -> None:
        """Stop following the states."""
        self.contents.close()
        self._states.observers.remove(self)

    # -- the check -----------------------------------------------------------------------------------------------------

    def check(self, batch: BatchTensors) -> None:
        """Compare a step with the content of the slots, then record its writes. Raise PlanError for the first
        violation.

        A step prepared before the samples it needs were known is checked when it is resolved. A step that is resolved
        or prepared again before it ran replaces its earlier record, so that its copies count once.
        """
        if self._last is not None and self._last.buffers is batch.buffers and self._last.is_pending:
            self.contents.undo()
            self._count_repeats(batch)
        if batch.step > self._last_step + 1:  # steps were not checked
            self.contents.reset()
            for freed in self._freed:
                freed.num_seen[:] = 0
        self._last_step = max(self._last_step, batch.step)
        live = np.flatnonzero(self._states.live)
        first = [self._first_visible(live, table) for table in self._states.block_tables]
        for g, freed in enumerate(self._freed):
            freed.check(batch, g, live, first[g])
        self.contents.keep()
        if not batch.is_resolved:
            return
        self._last, self._tokens = batch, _tokens_of(batch)
        for g, table in enumerate(self._states.block_tables):
            if table.group.recurrent:  # no token has a slot
                self._check_states(batch, g, table, live)
            else:
                self._check_writes(batch, g, table, live, first[g])
        if faults := self.contents.check(batch):
            self.contents.undo()
            raise _of_fault(batch, faults[0])

    def _count_repeats(self, batch: BatchTensors) -> None:
        """Warn once if a step is prepared repeatedly without a commit."""
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

    def _first_visible(self, rows: I64, table: BlockTable) -> I64:
        """Return the first entry of each row that a token from num_computed on can see."""
        window = table.group.sliding_window
        if window is None:
            return np.zeros(len(rows), np.int64)
        low = self._states.num_computed_tokens[rows].astype(np.int64) - window + 1
        return np.maximum(low, 0) // table.tokens_per_block

    def _check_writes(self, batch: BatchTensors, g: int, table: BlockTable, live: I64, first: I64) -> None:
        """Check that no slot is written twice, and none in a block that another live request sees."""
        slots = batch.slot_mapping[g][: batch.num_tokens]
        writes = np.flatnonzero(slots >= 0)
        written, at = np.unique(slots[writes], return_index=True)
        if len(written) < len(writes):
            t = int(np.setdiff1d(np.arange(len(writes)), at)[0])
            raise _of_write("two tokens of a step write one slot", batch, g, int(writes[t]), "a slot of its own")
        blocks = np.unique(written // table.group.block_size)
        held = table.table[live, : int(table.num_blocks[live].max(initial=0))]
        entries = np.arange(held.shape[1])
        seen = (entries >= first[:, None]) & (entries < table.num_blocks[live][:, None])
        row, entry = np.nonzero(seen & np.isin(held, blocks))
        if len(np.unique((row << 32) + held[row, entry])) == len(blocks):
            return  # each of them by its own request
        viewers: dict[int, set[int]] = {}
        for r, block in zip(live[row].tolist(), held[row, entry].tolist(), strict=True):
            viewers.setdefault(block, set()).add(r)
        for t in writes.tolist():
            block = int(slots[t]) // table.group.block_size
            if others := viewers.get(block, set()) - {int(batch.idx_mapping[batch.req_indices[t]])}:
                name = self._states.req_id_of(min(others))
                message = f"a write to block {block}, which request {name!r} sees"
                raise _of_write(message, batch, g, t, "a block of its own")

    def _check_states(self, batch: BatchTensors, g: int, table: BlockTable, live: I64) -> None:
        """Check that no two live requests have their states in one block, since every step of a request overwrites its
        state.
        """
        row, entry = np.nonzero(np.arange(table.width) < table.num_blocks[live][:, None])
        rows = live[row]
        held = table.table[rows, entry]
        blocks, first = np.unique(held, return_index=True)
        if len(blocks) == len(held):
            return
        i = int(np.setdiff1d(np.arange(len(held)), first)[0])
        owner = self._states.req_id_of(int(rows[first[np.searchsorted(blocks, held[i])]]))
        raise PlanError("there are two states in one block", step=batch.step,
                        request=self._states.req_id_of(int(rows[i])), tensor=f"states.block_table[{g}]",
                        index=(int(rows[i]), int(entry[i])), expected=f"a block that request {owner!r} does not have",
                        got=int(held[i]))  # fmt: skip


class _FreedBlocks:
    """The blocks of a KV group that the pool freed, and what each row saw at the last check."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._freed: set[int] = set()
        self.seen: I32 = table.table.copy()
        self.num_seen: I32 = np.zeros(len(table.num_blocks), np.int32)

    def add(self, block_ids: Iterable[int]) -> None:
        self._freed.update(map(int, block_ids))

    def check(self, batch: BatchTensors, g: int, live: I64, first: I64) -> None:
        """Check that no entry of the last check was freed since. A new entry is an allocation."""
        table = self._table
        width = int(table.num_blocks[live].max(initial=0))
        now, entries = table.table[live, :width], np.arange(width)
        held = entries < table.num_blocks[live][:, None]
        old = held & (now == self.seen[live, :width]) & (entries < self.num_seen[live][:, None])
        if self._freed:
            freed = np.isin(now, list(self._freed))
            wrong = freed & old & (entries >= first[:, None])
            if wrong.any():
                i, entry = (int(x) for x in np.argwhere(wrong)[0])
                row = int(live[i])
                raise PlanError("a freed block is still seen by the request that had it", step=batch.step,
                                request=batch.states.req_id_of(row), tensor=f"states.block_table[{g}]",
                                index=(row, entry), expected="a block it owns", got=int(now[i, entry]))  # fmt: skip
            self._freed.difference_update(now[held & ~old & freed].tolist())
        self.seen[live, :width], self.num_seen[live] = now, table.num_blocks[live]


def _of_write(message: str, batch: BatchTensors, g: int, t: int, expected: str) -> PlanError:
    request = batch.states.req_id_of(int(batch.idx_mapping[batch.req_indices[t]]))
    return PlanError(message, step=batch.step, request=request, tensor=f"slot_mapping[{g}]", index=t,
                     expected=expected, got=int(batch.slot_mapping[g][t]))  # fmt: skip


def _of_fault(batch: BatchTensors, fault: SlotFault) -> PlanError:
    if fault.writer is None:
        got = "nothing was written there"
    else:
        got = f"written by request {fault.writer!r}" + (", with other tokens" if fault.is_other else "")
    return PlanError(f"a read of slot {fault.slot}, which does not hold the request's tokens", step=batch.step,
                     request=batch.states.req_id_of(int(batch.idx_mapping[fault.request])),
                     tensor=f"block_table[{fault.group}]", index=(fault.request, fault.entry),
                     expected=f"the key and value of position {fault.position}", got=got)  # fmt: skip


def _tokens_of(batch: BatchTensors) -> list[list[int]]:
    """Return the rows, computed and scheduled tokens of a step, equal for steps that compute the same tokens."""
    return [x.tolist() for x in (batch.idx_mapping, batch.num_computed_tokens, batch.num_scheduled_tokens)]
