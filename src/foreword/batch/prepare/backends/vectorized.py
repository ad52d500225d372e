"""The step in NumPy: no loop over requests or tokens. The fallback where the native module is not built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I64, Bools, Ints
from foreword.batch.prepare.backends import Scalars
from foreword.batch.prepare.plan import Plan
from foreword.batch.state.block_table import BlockTable
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.kv_groups import ContextParallel

if TYPE_CHECKING:
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.state.request_states import RequestStates


def run(
    states: RequestStates, buffers: InputBuffers, plan: Plan, padded: tuple[int | None, int | None], gather: bool
) -> Scalars:
    rows, n = plan.rows, plan.num_scheduled
    B = len(rows)
    k = plan.num_drafts if plan.num_drafts.size else np.zeros(B, np.int32)
    c, prefill, known = states.num_computed_tokens[rows], states.prefill_len[rows], states.num_tokens[rows]
    placeholders, prompt, generation = (
        states.num_placeholders[rows],
        states.prompt_len[rows],
        states.row_generation[rows],
    )
    inert = plan.inert if plan.inert is not None else np.zeros(B, np.bool_)
    if plan.inert is not None:
        for column in (c, prefill, known, placeholders, prompt):
            column[inert] = 0
        generation[inert] = -1
    T = int(n.sum())
    old_T, old_B, old_gathered = (int(x) for x in buffers.written)
    Tp = T if padded[0] is None else padded[0]
    Bp = B if padded[1] is None else padded[1]

    if plan.draft_ids.size:
        at, staged = np.repeat(known + placeholders, k) + ragged_arange(k), ~np.repeat(inert, k)
        states.token_ids[np.repeat(rows, k)[staged], at[staged]] = np.maximum(plan.draft_ids, 0)[staged]
        buffers.draft_token_ids[: len(plan.draft_ids)] = plan.draft_ids

    buffers.idx_mapping[:B] = rows
    buffers.num_scheduled_tokens[:B] = n
    buffers.num_draft_tokens[:B] = k
    buffers.num_computed_tokens[:B] = c
    buffers.num_placeholders[:B] = placeholders
    np.less(c, prefill, out=buffers.is_prefilling[:B])
    buffers.row_generation[:B] = generation
    loc = buffers.query_start_loc
    loc[0] = 0
    np.cumsum(n, out=loc[1 : B + 1])
    loc[B + 1 : Bp + 1] = T
    np.add(c, n, out=buffers.seq_lens[:B])
    buffers.seq_lens[B:old_B] = 0
    if states.context_parallel is not None:
        buffers.dcp_local_seq_lens[:B] = local_seq_lens(buffers.seq_lens[:B], states.context_parallel)
        buffers.dcp_local_seq_lens[B:old_B] = 0

    req_indices = buffers.req_indices[:T]
    req_indices[:] = np.repeat(np.arange(B, dtype=np.int32), n)
    positions = buffers.positions[:T]
    np.add(np.arange(T), (c - loc[:B]).astype(np.int64)[req_indices], out=positions)
    token_rows = rows[req_indices]
    buffers.input_ids[:T] = states.token_ids[token_rows, positions]
    if placeholders.any():  # ids not known yet
        first = known[req_indices]
        buffers.input_ids[:T][(positions >= first) & (positions < first + placeholders[req_indices])] = 0
    if plan.inert is not None:
        buffers.input_ids[:T][inert[req_indices]] = 0
    buffers.positions[T:old_T] = 0
    buffers.input_ids[T:old_T] = 0

    for g, table in enumerate(states.block_tables):
        if gather:
            _gather(table, rows, c, buffers.block_table[g], buffers.block_table_written[g], old_gathered)
            buffers.block_table[g][:B][inert] = 0
            buffers.block_table_written[g][:B][inert] = 0
            buffers.block_table_content[g][: max(B, old_gathered)] = 0
        buffers.slot_mapping[g][:T] = slots(table, token_rows, positions)
        if plan.inert is not None:
            buffers.slot_mapping[g][:T][inert[req_indices]] = -1
        buffers.slot_mapping[g][T:old_T] = -1

    cu = buffers.cu_num_logits
    cu[0] = buffers.cu_num_draft_tokens[0] = 0
    np.cumsum(k, out=buffers.cu_num_draft_tokens[1 : B + 1])
    np.cumsum(k + 1, out=cu[1 : B + 1])
    L, D = int(cu[B]), int(buffers.cu_num_draft_tokens[B])
    local = ragged_arange(k + 1)
    buffers.logits_indices[:L] = np.repeat(loc[1 : B + 1] - 1 - k, k + 1) + local
    buffers.expanded_idx_mapping[:L] = np.repeat(rows, k + 1)
    buffers.expanded_local_pos[:L] = local
    buffers.bonus_logits_indices[:B] = cu[1 : B + 1] - 1
    buffers.target_logits_indices[:D] = np.repeat(cu[:B], k) + ragged_arange(k)

    buffers.written[:] = T, B, B if gather else old_gathered
    state = attention_state(c, n, prompt, inert, D > 0)
    max_seq_len = int(buffers.seq_lens[:B].max(initial=0))
    unresolved = int(np.count_nonzero(placeholders))
    return Scalars(B, T, Bp, Tp, L, D, int(n.max(initial=0)), max_seq_len, int(state), unresolved)


def ragged_arange(lengths: Ints) -> I64:
    """[0 … lengths[0] − 1, 0 … lengths[1] − 1, …] int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - lengths, lengths)


def slots(table: BlockTable, rows: Ints, positions: Ints) -> I64:
    """slot[t] = table[rows[t], positions[t] // P] · S + offset; −1 where another rank owns the position."""
    if table.group.recurrent:
        return np.full(len(positions), -1, np.int64)
    S, cp = table.group.block_size, table.context_parallel
    block, offset = np.divmod(positions, table.tokens_per_block)
    base = table.table[rows, block].astype(np.int64) * S
    if cp is None:
        return base + offset
    run = cp.interleave * cp.size
    local = offset // run * cp.interleave + offset % cp.interleave
    owned = (offset // cp.interleave) % cp.size == cp.rank
    return np.where(owned, base + local, -1)


def local_seq_lens(seq_lens: Ints, cp: ContextParallel) -> Ints:
    """Whole rounds of n·I tokens give this rank I each; of the rest it owns what falls in its turn."""
    rounds, rest = np.divmod(seq_lens, cp.interleave * cp.size)
    owned: Ints = rounds * cp.interleave + np.clip(rest - cp.rank * cp.interleave, 0, cp.interleave)
    return owned


def attention_state(c: Ints, n: Ints, prompt_len: Ints, inert: Bools, any_drafts: bool) -> AttentionState:
    """See `AttentionState`."""
    if any_drafts:
        return AttentionState.SPEC_DECODING
    if len(c) and bool(((n == 1) & ((c > 0) | inert)).all()):
        return AttentionState.DECODE_ONLY
    if not c.any():
        return AttentionState.PREFILL_NO_CACHE
    if bool((((c < prompt_len) & (c + n >= prompt_len)) | inert).all()):
        return AttentionState.PREFILL_CACHE_HIT
    return AttentionState.CHUNKED_PREFILL


def _gather(table: BlockTable, rows: Ints, c: Ints, out: Ints, written: Ints, old_B: int) -> None:
    """out[b] = the row's blocks, null past the end and below the window; rows of a larger earlier batch nulled."""
    B, held = len(rows), table.num_blocks[rows]
    stop = max(B, old_B)
    width = max(int(held.max(initial=0)), int(written[:stop].max(initial=0)))
    out[:B, :width] = table.table[rows, :width]  # the table itself is null past num_blocks
    out[B:stop, :width] = 0
    window = table.group.sliding_window
    if window is not None and window >= 2:
        below = np.maximum(c - window + 1, 0) // table.tokens_per_block
        out[:B, :width][np.arange(width) < below[:, None]] = 0
    written[:B] = held
    written[B:stop] = 0
