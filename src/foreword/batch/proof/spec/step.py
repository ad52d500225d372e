"""The step of a batch, reconstructed by majority vote over redundant tensors: one wrong entry is found by name."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from foreword.arrays import I64, AnyArray, Bools, Ints
from foreword.batch.state.block_table import BlockTable
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.attention import AttentionState
from foreword.errors import PlanError


class Step:
    """The variables in which the relations of `TENSORS` are written. Lower-case letters are vectors over the requests
    of the batch:

    rows  state row        c  computed tokens    n  scheduled tokens    k  drafts    v  known tokens
    cancelled  the request was removed while its step was in flight: nothing of its row is read, c = v = 0

    n, k, rows and cancelled each follow from several tensors. The value that most of them agree on is taken, so an
    entry that differs is wrong in its own tensor and nowhere else.
    """

    def __init__(self, batch: BatchTensors) -> None:
        self.batch, self.states = batch, batch.states
        self.M, self.V = batch.states.max_model_len, batch.states.vocab_size
        self.symbols: dict[tuple[str, int], int] = {}  # (symbol, KV group): its size, of those that were asked for

    # -- the plan ----------------------------------------------------------------------------------------------

    @cached_property
    def B(self) -> int:
        loc = self.batch.query_start_loc
        claims = (self.batch.num_reqs, np.count_nonzero(self.batch.seq_lens), np.count_nonzero(loc[:-1] < loc[-1]))
        return sorted(int(number) for number in claims)[1]

    @cached_property
    def n(self) -> I64:
        b, B = self.batch, self.B
        claims = (b.num_scheduled_tokens, np.diff(b.query_start_loc[: B + 1]), b.seq_lens[:B] - b.num_computed_tokens)
        return _median(*claims)

    @cached_property
    def k(self) -> I64:
        b = self.batch
        return _median(b.num_draft_tokens, np.diff(b.cu_num_draft_tokens), np.diff(b.cu_num_logits) - 1)

    @cached_property
    def rows(self) -> I64:
        """The rows [B]: idx_mapping, or expanded_idx_mapping where the request's other tensors agree with that one
        instead.
        """
        batch, ends = self.batch, np.cumsum(self.k + 1)
        rows = batch.idx_mapping.astype(np.int64)
        if not self.B:
            return rows
        expanded = batch.expanded_idx_mapping
        other = expanded[np.minimum(ends - 1, len(expanded) - 1)].astype(np.int64)
        for b in np.flatnonzero(rows != other).tolist():
            if self._agrees(b, int(other[b])) > self._agrees(b, int(rows[b])):
                rows[b] = other[b]
        bad = (rows < 0) | (rows >= self.states.max_num_reqs)
        bad[~bad] = ~self.states.live[rows[~bad]] & ~self.cancelled[~bad]
        if bad.any():
            b = int(np.argmax(bad))
            raise PlanError("a row that holds no request", step=batch.step, tensor="idx_mapping", index=b,
                            expected="a live row", got=int(rows[b]))  # fmt: skip
        return rows

    @cached_property
    def cancelled(self) -> Bools:
        """Return whether each request [B] is cancelled: it has row_generation −1, starts at 0 and computes nothing.

        Every token of it is 0, with slot −1.
        """
        batch, ends = self.batch, np.cumsum(self.n)
        claims = np.zeros((3, self.B), np.int8)
        claims[0] = batch.row_generation == -1
        claims[1] = (batch.num_computed_tokens == 0) & ~batch.is_prefilling
        for b, end in enumerate(ends.tolist()):
            tokens = slice(end - int(self.n[b]), end)
            nowhere = all((slots[tokens] == -1).all() for slots in batch.slot_mapping)
            claims[2, b] = nowhere and not batch.input_ids[tokens].any()
        most: Bools = claims.sum(0) >= 2
        return most

    def _agrees(self, b: int, row: int) -> int:
        """Return the number of other tensors of request b that fit the row."""
        batch, states = self.batch, self.states
        if not 0 <= row < states.max_num_reqs or not states.live[row]:
            return -1
        c, t = int(states.num_computed_tokens[row]), int(self.loc[b])
        if c >= states.max_model_len:
            return -1
        slot = slots(states.block_tables[0], np.array([row]), np.array([c]))[0]
        claims = (
            (batch.num_computed_tokens[b], c),
            (batch.row_generation[b], states.row_generation[row]),
            (batch.input_ids[t], states.token_ids[row, c]),
            (batch.slot_mapping[0][t], slot),
        )
        return sum(int(x == y) for x, y in claims)

    # -- what follows from it ----------------------------------------------------------------------------------

    @cached_property
    def c(self) -> I64:
        return self.of_rows("num_computed_tokens")

    @cached_property
    def v(self) -> I64:
        return self.of_rows("num_tokens")

    @cached_property
    def in_flight(self) -> I64:
        """The number of tokens after the known ones that a step in flight will sample, [B]."""
        return self.of_rows("num_placeholders")

    def of_rows(self, name: str) -> I64:
        """Return a column of the state in batch order, [B]; 0 for a cancelled request."""
        return np.where(self.cancelled, 0, self.state(name)[self.rows]).astype(np.int64)

    @cached_property
    def loc(self) -> I64:
        """The first token of each request, then T, [B + 1]."""
        return _prefix_sum(self.n)

    @cached_property
    def T(self) -> int:
        return int(self.loc[-1])

    @cached_property
    def b_of_token(self) -> I64:
        return np.repeat(np.arange(self.B), self.n)

    @cached_property
    def positions(self) -> I64:
        return np.arange(self.T) - self.loc[self.b_of_token] + self.c[self.b_of_token]

    @cached_property
    def token_rows(self) -> I64:
        return self.rows[self.b_of_token]

    @cached_property
    def cu_logits(self) -> I64:
        return _prefix_sum(self.k + 1)

    @cached_property
    def cu_drafts(self) -> I64:
        return _prefix_sum(self.k)

    @cached_property
    def b_of_logit(self) -> I64:
        return np.repeat(np.arange(self.B), self.k + 1)

    @cached_property
    def local_pos(self) -> I64:
        """The numbers 0 … k[b] of each request, one after the other, [L]."""
        return np.arange(self.cu_logits[-1]) - self.cu_logits[self.b_of_logit]

    @cached_property
    def b_of_draft(self) -> I64:
        return np.repeat(np.arange(self.B), self.k)

    @cached_property
    def draft_pos(self) -> I64:
        """The numbers 0 … k[b] − 1 of each request, one after the other, [D]."""
        return np.arange(self.cu_drafts[-1]) - self.cu_drafts[self.b_of_draft]

    def staged_drafts(self, got: Ints) -> I64:
        """Return the drafts [D] as staged after the known tokens, an unknown one (−1) as token 0."""
        b = self.b_of_draft
        at = (self.v + self.in_flight)[b] + self.draft_pos
        staged = self.states.token_ids[self.rows[b], np.minimum(at, self.M - 1)].astype(np.int64)
        return np.where((got == -1) & (staged == 0) | self.cancelled[b], got, staged)

    def input_ids(self) -> I64:
        """Return the tokens [T]; 0 where they are in flight, or of a cancelled request."""
        b, p = self.b_of_token, self.positions
        unknown = (p >= self.v[b]) & (p < (self.v + self.in_flight)[b])
        return np.where(unknown | self.cancelled[b], 0, self.states.token_ids[self.token_rows, p]).astype(np.int64)

    def bidirectional_ranges(self) -> I64:
        """Return the range [T, 2] that each token is in, (0, 0) for none."""
        out, by_row = np.zeros((self.T, 2), np.int64), self.states.extras.bidirectional_ranges
        for row in set(self.rows[~self.cancelled].tolist()) & by_row.keys():
            of_row = self.token_rows == row
            for start, stop in by_row[row]:
                out[of_row & (self.positions >= start) & (self.positions < stop)] = start, stop
        return out

    def attention_state(self) -> int:
        """Return the first state whose test holds, see `AttentionState`."""
        c, n, prompt, cancelled = self.c, self.n, self.of_rows("prompt_len"), self.cancelled
        tests = (
            (bool(self.k.any()), AttentionState.SPEC_DECODING),
            (self.B > 0 and bool(((n == 1) & ((c > 0) | cancelled)).all()), AttentionState.DECODE_ONLY),
            (not c.any(), AttentionState.PREFILL_NO_CACHE),
            (bool(((c < prompt) & (c + n >= prompt) | cancelled).all()), AttentionState.PREFILL_CACHE_HIT),
        )
        return int(next((state for holds, state in tests if holds), AttentionState.CHUNKED_PREFILL))

    # -- blocks ------------------------------------------------------------------------------------------------

    def table(self, g: int) -> BlockTable:
        return self.states.block_tables[g]

    def held(self, g: int) -> Bools:
        """Return whether each entry [B, K] belongs to the request."""
        return np.arange(self.table(g).width) < self.num_blocks(g)[:, None]

    def num_blocks(self, g: int) -> I64:
        """Return the number of blocks of each request, [B]."""
        return np.where(self.cancelled, 0, self.table(g).num_blocks[self.rows]).astype(np.int64)

    def below_window(self, g: int) -> Bools:
        """Return whether no token of this step can see the entry, [B, K]."""
        window, P = self.table(g).group.sliding_window, self.table(g).tokens_per_block
        ends = (np.arange(self.table(g).width) + 1) * P
        if window is None or window < 2:
            return np.zeros((self.B, len(ends)), np.bool_)
        return ends <= self.c[:, None] - window + 1

    def local_seq_lens(self) -> I64:
        """Return the number of positions of each request that this rank owns, counted one by one, [B]."""
        cp, seq_lens = self.states.context_parallel, self.c + self.n
        if cp is None:
            return seq_lens
        owned = np.arange(int(seq_lens.max(initial=0))) // cp.interleave % cp.size == cp.rank
        count: I64 = _prefix_sum(owned.astype(np.int64))[seq_lens]
        return count

    def slots(self, g: int) -> I64:
        """Return block · S + offset of each token, −1 where another rank owns the position, [T]."""
        where = slots(self.table(g), self.token_rows, self.positions)
        where[self.cancelled[self.b_of_token]] = -1
        return where

    def block_offsets(self, g: int) -> I64:
        table = self.table(g)
        return local_offsets(table, self.positions % table.tokens_per_block)

    # -- the state, row by row ------------------------------------------------------------------------------------

    def state(self, name: str) -> AnyArray:
        """Return one of the state's arrays, [R, …]."""
        array: AnyArray = getattr(self.states, name)
        return array

    @cached_property
    def live(self) -> Bools:
        """Return whether each row holds a request, [R]."""
        live = np.zeros(self.states.max_num_reqs, np.bool_)
        live[[self.states.row_of(rid) for rid in self.states.req_ids]] = True
        return live

    def where_live(self, expected: Any, got: AnyArray) -> AnyArray:
        """Return ``expected`` for the rows that hold a request; the padding rule checks the others."""
        live = self.live.reshape(-1, *([1] * (got.ndim - 1)))
        return np.where(live, expected, got)

    def adapters(self) -> I64:
        """Return the adapter of each row, from the adapters' lists of users, [R]."""
        s = self.states
        out = np.zeros(s.max_num_reqs, np.int64)
        for adapter in s.loras.in_use:
            out[[s.row_of(req_id) for req_id in s.loras.users(adapter)]] = adapter
        return out

    def last_sampled(self) -> I64:
        """Return the last output of each row, −1 before there is one, [R]."""
        s = self.states
        last = s.token_ids[np.arange(s.max_num_reqs), np.maximum(s.num_tokens - 1, 0)]
        return np.where(s.num_tokens > s.prompt_len, last, -1).astype(np.int64)


def local_offsets(table: BlockTable, offsets: I64) -> I64:
    """Map offsets in a virtual block of P positions to offsets in this rank's block of S."""
    cp = table.context_parallel
    if cp is None:
        return offsets
    return offsets // (cp.interleave * cp.size) * cp.interleave + offsets % cp.interleave


def slots(table: BlockTable, rows: I64, positions: I64) -> I64:
    """Return where the keys and values of these positions go; −1 where another rank owns them, and in recurrent
    groups.
    """
    if table.group.recurrent:
        return np.full(len(positions), -1, np.int64)
    cp, offsets = table.context_parallel, positions % table.tokens_per_block
    blocks = table.table[rows, positions // table.tokens_per_block].astype(np.int64)
    slot = blocks * table.group.block_size + local_offsets(table, offsets)
    return slot if cp is None else np.where(offsets // cp.interleave % cp.size == cp.rank, slot, -1)


def _prefix_sum(values: I64) -> I64:
    out = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=out[1:])
    return out


def _median(*claims: AnyArray) -> I64:
    """Return the median of three arrays entry by entry: if two of them are equal, their value."""
    middle: I64 = np.sort(np.stack([t.astype(np.int64) for t in claims]), axis=0)[1]
    return middle
