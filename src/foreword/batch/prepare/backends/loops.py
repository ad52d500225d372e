"""The definition: every quantity of a step as a plain loop. Slow and simple; the other backends must equal it.

Read `run` for the order, and one function for one tensor. Symbols as in the tensor reference: B requests with
``num_computed`` c and ``num_scheduled`` n tokens, T tokens in all, S block size, K entries of a block-table row.
"""

from __future__ import annotations

from typing import Any

from foreword.arrays import I32
from foreword.batch.prepare.plan import Padding, check
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.layout import PAD_SLOT_ID, Scalars
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.kv_groups import ContextParallel
from foreword.batch.values.plan import Plan, ragged


def query_start_loc(num_scheduled: list[int]) -> list[int]:
    """Return the prefix sums with a leading 0: the tokens of request b are [loc[b], loc[b + 1])."""
    loc = [0]
    for n in num_scheduled:
        loc.append(loc[-1] + n)
    return loc


def req_indices(num_scheduled: list[int]) -> list[int]:
    """Return the batch index of the request of each token."""
    return [b for b, n in enumerate(num_scheduled) for _ in range(n)]


def positions(num_computed: list[int], num_scheduled: list[int]) -> list[int]:
    """Return the position of each token in its request. The first one follows the computed tokens."""
    return [c + i for c, n in zip(num_computed, num_scheduled, strict=True) for i in range(n)]


def slot(block_row: list[int], position: int, block_size: int, cp: ContextParallel | None) -> int:
    """Return the slot of the key and value of a position: block · S + offset; −1 on a rank that does not own the
    position.
    """
    if cp is None:
        return block_row[position // block_size] * block_size + position % block_size
    virtual = block_size * cp.size
    offset = position % virtual
    if (offset // cp.interleave) % cp.size != cp.rank:
        return -1
    local = offset // (cp.interleave * cp.size) * cp.interleave + offset % cp.interleave
    return block_row[position // virtual] * block_size + local


def block_row(table: BlockTable, row: int, num_computed: int) -> list[int]:
    """Return a request's blocks. Entries past the end, and those below the sliding window of every token of this step,
    are null.
    """
    window, per_block = table.group.sliding_window, table.tokens_per_block
    blocks = [table.null_block] * table.width
    for k in range(int(table.num_blocks[row])):
        below = window is not None and window >= 2 and (k + 1) * per_block <= num_computed - window + 1
        blocks[k] = table.null_block if below else int(table.table[row, k])
    return blocks


def local_seq_len(seq_len: int, cp: ContextParallel) -> int:
    """Return the number of the first seq_len positions that this rank owns."""
    return sum((p // cp.interleave) % cp.size == cp.rank for p in range(seq_len))


def attention_state(
    num_computed: list[int], num_scheduled: list[int], prompt_len: list[int], cancelled: list[bool], any_drafts: bool
) -> AttentionState:
    """Return the kind of the step: the first condition that holds decides. A cancelled request fits every kind that its
    n allows.
    """
    rows = list(zip(num_computed, num_scheduled, prompt_len, cancelled, strict=True))
    if any_drafts:
        return AttentionState.SPEC_DECODING
    if rows and all(n == 1 and (c > 0 or i) for c, n, _, i in rows):
        return AttentionState.DECODE_ONLY
    if all(c == 0 for c, _, _, _ in rows):
        return AttentionState.PREFILL_NO_CACHE
    if all(c < p <= c + n or i for c, n, p, i in rows):
        return AttentionState.PREFILL_CACHE_HIT
    return AttentionState.CHUNKED_PREFILL


def run(states: RequestStates, buffers: InputBuffers, plan: Plan, pad: Padding, gather: bool) -> Scalars:
    """Prepare a step as the definition says, one element at a time."""
    plan = check(states, buffers, plan, pad)
    buffers.generation += 1
    out: dict[str, Any] = buffers.arrays
    rows = [int(r) for r in plan[0]]
    n = [int(x) for x in plan[1]]
    num_drafts, draft_ids = ragged(plan)
    k = [int(x) for x in num_drafts]
    cancelled = [bool(i) for i in plan[3]] if plan[3] is not None else [False] * len(rows)

    def of_rows(column: I32) -> list[int]:
        return [0 if i else int(column[r]) for r, i in zip(rows, cancelled, strict=True)]

    c, prefill, prompt = of_rows(states.num_computed_tokens), of_rows(states.prefill_len), of_rows(states.prompt_len)
    known, placeholders = of_rows(states.num_tokens), of_rows(states.num_placeholders)
    loc = query_start_loc(n)
    B, T = len(rows), loc[-1]
    Tp = T if pad[0] < 0 else pad[0]
    Bp = B if pad[1] < 0 else pad[1]
    drafts = [int(t) for t in draft_ids]

    # Drafts are written after the known tokens of their request. A draft whose id is not known yet is read as token 0.
    d = 0
    for b in range(B):
        for j in range(k[b]):
            if not cancelled[b]:
                states.token_ids[rows[b], known[b] + placeholders[b] + j] = max(drafts[d], 0)
            out["draft_token_ids"][d] = drafts[d]
            d += 1

    # Requests.
    for b in range(B):
        out["num_scheduled_tokens"][b] = n[b]
        out["num_draft_tokens"][b] = k[b]
        out["num_placeholders"][b] = placeholders[b]
        out["row_generation"][b] = -1 if cancelled[b] else states.row_generation[rows[b]]
    for b in range(Bp + 1):
        out["query_start_loc"][b] = loc[min(b, B)]
    for b in range(buffers.max_num_reqs):
        out["idx_mapping"][b] = rows[b] if b < B else -1
        out["num_computed_tokens"][b] = c[b] if b < B else 0
        out["is_prefilling"][b] = b < B and c[b] < prefill[b]
        out["seq_lens"][b] = c[b] + n[b] if b < B else 0
        if states.context_parallel is not None:
            out["dcp_local_seq_lens"][b] = local_seq_len(int(out["seq_lens"][b]), states.context_parallel)

    # Tokens.
    b_of, pos = req_indices(n), positions(c, n)
    for t in range(T):
        out["req_indices"][t] = b_of[t]
        out["positions"][t] = pos[t]
        b = b_of[t]
        in_flight = known[b] <= pos[t] < known[b] + placeholders[b]  # its id is not known yet
        out["input_ids"][t] = 0 if in_flight or cancelled[b] else states.token_ids[rows[b], pos[t]]
    for t in range(T, buffers.max_num_batched_tokens):
        out["positions"][t] = out["input_ids"][t] = 0

    # Blocks and slots of each KV group.
    for g, table in enumerate(states.block_tables):
        for b in range(buffers.max_num_reqs if gather else 0):
            live = b < B and not cancelled[b]
            out["block_table"][g][b] = block_row(table, rows[b], c[b]) if live else [table.null_block] * table.width
            out["num_blocks"][g][b] = int(table.num_blocks[rows[b]]) if live else 0
            out["content_id"][g][b] = 0
        for t in range(buffers.max_num_batched_tokens):
            out["slot_mapping"][g][t] = (
                slot(table.table[rows[b_of[t]]].tolist(), pos[t], table.group.block_size, table.context_parallel)
                if t < T and not cancelled[b_of[t]] and not table.group.recurrent
                else PAD_SLOT_ID
            )

    # Logits: the last 1 + drafts tokens of each request.
    row = d = 0
    out["logits_indices"][:] = 0
    out["expanded_idx_mapping"][:] = -1
    out["cu_num_logits"][0] = out["cu_num_draft_tokens"][0] = 0
    for b in range(B):
        for j in range(1 + k[b]):
            out["logits_indices"][row] = loc[b + 1] - 1 - k[b] + j
            out["expanded_idx_mapping"][row] = rows[b]
            out["expanded_local_pos"][row] = j
            if j < k[b]:
                out["target_logits_indices"][d] = row
                d += 1
            else:
                out["bonus_logits_indices"][b] = row
            row += 1
        out["cu_num_logits"][b + 1] = row
        out["cu_num_draft_tokens"][b + 1] = d

    buffers.written[:] = T, B, row, B if gather else buffers.written[3]
    seq_lens = [x + y for x, y in zip(c, n, strict=True)]
    state = attention_state(c, n, prompt, cancelled, any(k))
    longest, most_keys, unresolved = max(n, default=0), max(seq_lens, default=0), sum(map(bool, placeholders))
    scalars = Scalars(B, T, Bp, Tp, row, d, longest, most_keys, int(state), unresolved)
    buffers.scalars[:] = scalars
    return scalars
