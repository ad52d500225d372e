"""Prepare the step with NumPy, without a loop over requests or tokens. It is used if the native module is not built."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.arrays import Bools, Ints
from foreword.batch.prepare.plan import Padding, check
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.layout import PAD_SLOT_ID, Scalars
from foreword.batch.step.slots import ragged_arange, slots
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.kv_groups import ContextParallel
from foreword.batch.values.plan import Plan, ragged


def run(states: RequestStates, buffers: InputBuffers, plan: Plan, pad: Padding, gather: bool) -> Scalars:
    """Prepare a step with array operations of NumPy."""
    plan = check(states, buffers, plan, pad)
    buffers.generation += 1
    out: dict[str, Any] = buffers.arrays
    rows, n, _, removed = plan
    B = len(rows)
    k, draft_ids = ragged(plan)
    c, prefill, known = states.num_computed_tokens[rows], states.prefill_len[rows], states.num_tokens[rows]
    placeholders, prompt = states.num_placeholders[rows], states.prompt_len[rows]
    generation = states.row_generation[rows]
    cancelled = removed if removed is not None else np.zeros(B, np.bool_)
    if removed is not None:
        for column in (c, prefill, known, placeholders, prompt):
            column[cancelled] = 0
        generation[cancelled] = -1
    T = int(n.sum())
    old_T, old_B, old_L, old_gathered = buffers.written.tolist()
    Tp = T if pad[0] < 0 else pad[0]
    Bp = B if pad[1] < 0 else pad[1]

    if draft_ids.size:
        at, staged = np.repeat(known + placeholders, k) + ragged_arange(k), ~np.repeat(cancelled, k)
        states.token_ids[np.repeat(rows, k)[staged], at[staged]] = np.maximum(draft_ids, 0)[staged]
        out["draft_token_ids"][: len(draft_ids)] = draft_ids

    for name, values, padding in (
        ("idx_mapping", rows, -1),
        ("num_computed_tokens", c, 0),
        ("is_prefilling", c < prefill, False),
        ("seq_lens", c + n, 0),
    ):
        out[name][:B] = values
        if old_B > B:
            out[name][B:old_B] = padding
    out["num_scheduled_tokens"][:B] = n
    out["num_draft_tokens"][:B] = k
    out["num_placeholders"][:B] = placeholders
    out["row_generation"][:B] = generation
    loc = out["query_start_loc"]
    loc[0] = 0
    np.cumsum(n, out=loc[1 : B + 1])
    loc[B + 1 : Bp + 1] = T
    if states.context_parallel is not None:
        out["dcp_local_seq_lens"][:B] = local_seq_lens(out["seq_lens"][:B], states.context_parallel)
        out["dcp_local_seq_lens"][B:old_B] = 0

    req_indices = out["req_indices"][:T]
    req_indices[:] = np.repeat(np.arange(B, dtype=np.int32), n)
    positions = out["positions"][:T]
    np.add(np.arange(T), (c - loc[:B]).astype(np.int64)[req_indices], out=positions)
    token_rows = rows[req_indices]
    input_ids = out["input_ids"][:T]
    input_ids[:] = states.token_ids[token_rows, positions]
    if placeholders.any():  # ids not known yet
        first = known[req_indices]
        input_ids[(positions >= first) & (positions < first + placeholders[req_indices])] = 0
    if removed is not None:
        input_ids[cancelled[req_indices]] = 0
    if old_T > T:
        out["positions"][T:old_T] = out["input_ids"][T:old_T] = 0

    for g, table in enumerate(states.block_tables):
        if gather:
            _gather(table, rows, c, out["block_table"][g], out["num_blocks"][g], old_gathered)
            if removed is not None:
                out["block_table"][g][:B][removed] = table.null_block
                out["num_blocks"][g][:B][removed] = 0
            out["content_id"][g][: max(B, old_gathered)] = 0
        slot_mapping = out["slot_mapping"][g]
        slot_mapping[:T] = slots(table, token_rows, positions)
        if removed is not None:
            slot_mapping[:T][cancelled[req_indices]] = PAD_SLOT_ID
        slot_mapping[T:old_T] = PAD_SLOT_ID

    cu, cu_drafts = out["cu_num_logits"], out["cu_num_draft_tokens"]
    cu[0] = cu_drafts[0] = 0
    np.cumsum(k, out=cu_drafts[1 : B + 1])
    np.cumsum(k + 1, out=cu[1 : B + 1])
    L, D = int(cu[B]), int(cu_drafts[B])
    local = ragged_arange(k + 1)
    out["logits_indices"][:L] = np.repeat(loc[1 : B + 1] - 1 - k, k + 1) + local
    out["expanded_idx_mapping"][:L] = np.repeat(rows, k + 1)
    out["expanded_local_pos"][:L] = local
    out["logits_indices"][L:old_L] = 0
    out["expanded_idx_mapping"][L:old_L] = -1
    out["bonus_logits_indices"][:B] = cu[1 : B + 1] - 1
    out["target_logits_indices"][:D] = np.repeat(cu[:B], k) + ragged_arange(k)

    buffers.written[:] = T, B, L, B if gather else old_gathered
    state = attention_state(c, n, prompt, cancelled, D > 0)
    most_keys, unresolved = int(out["seq_lens"][:B].max(initial=0)), int(np.count_nonzero(placeholders))
    scalars = Scalars(B, T, Bp, Tp, L, D, int(n.max(initial=0)), most_keys, int(state), unresolved)
    buffers.scalars[:] = scalars
    return scalars


def local_seq_lens(seq_lens: Ints, cp: ContextParallel) -> Ints:
    """Return this rank's number of tokens: I of each whole round of n·I tokens, and of the rest the part in its
    interval.
    """
    rounds, rest = np.divmod(seq_lens, cp.interleave * cp.size)
    owned: Ints = rounds * cp.interleave + np.clip(rest - cp.rank * cp.interleave, 0, cp.interleave)
    return owned


def attention_state(c: Ints, n: Ints, prompt_len: Ints, cancelled: Bools, any_drafts: bool) -> AttentionState:
    """Return the kind of a step, from computed and scheduled tokens c, n [B]."""
    if any_drafts:
        return AttentionState.SPEC_DECODING
    if len(c) and bool(((n == 1) & ((c > 0) | cancelled)).all()):
        return AttentionState.DECODE_ONLY
    if not c.any():
        return AttentionState.PREFILL_NO_CACHE
    if bool((((c < prompt_len) & (c + n >= prompt_len)) | cancelled).all()):
        return AttentionState.PREFILL_CACHE_HIT
    return AttentionState.CHUNKED_PREFILL


def _gather(table: BlockTable, rows: Ints, c: Ints, out: Ints, written: Ints, old_B: int) -> None:
    """Write out[b] = the row's blocks, null past the end and below the window. Rows that a larger earlier batch wrote
    become null.
    """
    B, held = len(rows), table.num_blocks[rows]
    stop = max(B, old_B)
    width = max(int(held.max(initial=0)), int(written[:stop].max(initial=0)))
    out[:B, :width] = table.table[rows, :width]  # the table itself is null past num_blocks
    out[B:stop, :width] = table.null_block
    window = table.group.sliding_window
    if window is not None and window >= 2:
        below = np.maximum(c - window + 1, 0) // table.tokens_per_block
        out[:B, :width][np.arange(width) < below[:, None]] = table.null_block
    written[:B] = held
    written[B:stop] = 0
