"""The definition: every quantity of a step as a plain loop. Slow on purpose; the other backends must equal it.

Read `run` for the order, and one function for one tensor. Symbols as in the tensor reference: B requests with
``num_computed`` c and ``num_scheduled`` n tokens, T tokens in all, S block size, K entries of a block-table row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreword.arrays import I32
from foreword.batch.prepare.backends import Scalars
from foreword.batch.prepare.plan import Plan
from foreword.batch.state.block_table import BlockTable
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.kv_groups import ContextParallel

if TYPE_CHECKING:
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.state.request_states import RequestStates


def query_start_loc(num_scheduled: list[int]) -> list[int]:
    """Prefix sum with a leading 0: the tokens of request b are [loc[b], loc[b + 1])."""
    loc = [0]
    for n in num_scheduled:
        loc.append(loc[-1] + n)
    return loc


def req_indices(num_scheduled: list[int]) -> list[int]:
    """Which request each token belongs to."""
    return [b for b, n in enumerate(num_scheduled) for _ in range(n)]


def positions(num_computed: list[int], num_scheduled: list[int]) -> list[int]:
    """Where each token stands in its request: right after what is computed."""
    return [c + i for c, n in zip(num_computed, num_scheduled, strict=True) for i in range(n)]


def slot(block_row: list[int], position: int, block_size: int, cp: ContextParallel | None) -> int:
    """Where the key and value of a position go: block · S + offset; −1 on a rank that does not own the position."""
    if cp is None:
        return block_row[position // block_size] * block_size + position % block_size
    virtual = block_size * cp.size
    offset = position % virtual
    if (offset // cp.interleave) % cp.size != cp.rank:
        return -1
    local = offset // (cp.interleave * cp.size) * cp.interleave + offset % cp.interleave
    return block_row[position // virtual] * block_size + local


def block_row(table: BlockTable, row: int, num_computed: int) -> list[int]:
    """A request's blocks; null past the end, and where no token of this step can look through the sliding window."""
    window, per_block = table.group.sliding_window, table.tokens_per_block
    blocks = [0] * table.width
    for k in range(int(table.num_blocks[row])):
        below = window is not None and window >= 2 and (k + 1) * per_block <= num_computed - window + 1
        blocks[k] = 0 if below else int(table.table[row, k])
    return blocks


def local_seq_len(seq_len: int, cp: ContextParallel) -> int:
    """How many of the first seq_len positions this rank owns."""
    return sum((p // cp.interleave) % cp.size == cp.rank for p in range(seq_len))


def attention_state(
    num_computed: list[int], num_scheduled: list[int], prompt_len: list[int], inert: list[bool], any_drafts: bool
) -> AttentionState:
    """The first test that holds decides. An inert request stands in nobody's way."""
    rows = list(zip(num_computed, num_scheduled, prompt_len, inert, strict=True))
    if any_drafts:
        return AttentionState.SPEC_DECODING
    if rows and all(n == 1 and (c > 0 or i) for c, n, _, i in rows):
        return AttentionState.DECODE_ONLY
    if all(c == 0 for c, _, _, _ in rows):
        return AttentionState.PREFILL_NO_CACHE
    if all(c < p <= c + n or i for c, n, p, i in rows):
        return AttentionState.PREFILL_CACHE_HIT
    return AttentionState.CHUNKED_PREFILL


def run(
    states: RequestStates, buffers: InputBuffers, plan: Plan, padded: tuple[int | None, int | None], gather: bool
) -> Scalars:
    rows = [int(r) for r in plan.rows]
    n = [int(x) for x in plan.num_scheduled]
    k = [int(x) for x in plan.num_drafts] if plan.num_drafts.size else [0] * len(rows)
    inert = [bool(i) for i in plan.inert] if plan.inert is not None else [False] * len(rows)

    def of_rows(column: I32) -> list[int]:
        return [0 if i else int(column[r]) for r, i in zip(rows, inert, strict=True)]

    c, prefill, prompt = of_rows(states.num_computed_tokens), of_rows(states.prefill_len), of_rows(states.prompt_len)
    known, placeholders = of_rows(states.num_tokens), of_rows(states.num_placeholders)
    loc = query_start_loc(n)
    B, T = len(rows), loc[-1]
    Tp = T if padded[0] is None else padded[0]
    Bp = B if padded[1] is None else padded[1]
    drafts = [int(t) for t in plan.draft_ids]

    # Drafts stand past the known tokens of their request; one whose id is not known yet reads as token 0.
    d = 0
    for b in range(B):
        for j in range(k[b]):
            if not inert[b]:
                states.token_ids[rows[b], known[b] + placeholders[b] + j] = max(drafts[d], 0)
            buffers.draft_token_ids[d] = drafts[d]
            d += 1

    # Requests.
    for b in range(B):
        buffers.idx_mapping[b] = rows[b]
        buffers.num_scheduled_tokens[b] = n[b]
        buffers.num_draft_tokens[b] = k[b]
        buffers.num_computed_tokens[b] = c[b]
        buffers.num_placeholders[b] = placeholders[b]
        buffers.is_prefilling[b] = c[b] < prefill[b]
        buffers.row_generation[b] = -1 if inert[b] else states.row_generation[rows[b]]
    for b in range(Bp + 1):
        buffers.query_start_loc[b] = loc[min(b, B)]
    for b in range(buffers.max_num_reqs):
        buffers.seq_lens[b] = c[b] + n[b] if b < B else 0
        if states.context_parallel is not None:
            buffers.dcp_local_seq_lens[b] = local_seq_len(int(buffers.seq_lens[b]), states.context_parallel)

    # Tokens.
    b_of, pos = req_indices(n), positions(c, n)
    for t in range(T):
        buffers.req_indices[t] = b_of[t]
        buffers.positions[t] = pos[t]
        b = b_of[t]
        in_flight = known[b] <= pos[t] < known[b] + placeholders[b]  # its id is not known yet
        buffers.input_ids[t] = 0 if in_flight or inert[b] else states.token_ids[rows[b], pos[t]]
    for t in range(T, buffers.max_num_batched_tokens):
        buffers.positions[t] = buffers.input_ids[t] = 0

    # Blocks and slots of each KV group.
    for g, table in enumerate(states.block_tables):
        for b in range(buffers.max_num_reqs if gather else 0):
            live = b < B and not inert[b]
            buffers.block_table[g][b] = block_row(table, rows[b], c[b]) if live else [0] * table.width
            buffers.block_table_written[g][b] = int(table.num_blocks[rows[b]]) if live else 0
            buffers.block_table_content[g][b] = 0
        for t in range(buffers.max_num_batched_tokens):
            buffers.slot_mapping[g][t] = (
                slot(table.table[rows[b_of[t]]].tolist(), pos[t], table.group.block_size, table.context_parallel)
                if t < T and not inert[b_of[t]] and not table.group.recurrent
                else -1
            )

    # Logits: the last 1 + drafts tokens of each request.
    out = d = 0
    buffers.cu_num_logits[0] = buffers.cu_num_draft_tokens[0] = 0
    for b in range(B):
        for j in range(1 + k[b]):
            buffers.logits_indices[out] = loc[b + 1] - 1 - k[b] + j
            buffers.expanded_idx_mapping[out] = rows[b]
            buffers.expanded_local_pos[out] = j
            if j < k[b]:
                buffers.target_logits_indices[d] = out
                d += 1
            else:
                buffers.bonus_logits_indices[b] = out
            out += 1
        buffers.cu_num_logits[b + 1] = out
        buffers.cu_num_draft_tokens[b + 1] = d

    buffers.written[:] = T, B, B if gather else buffers.written[2]
    seq_lens = [x + y for x, y in zip(c, n, strict=True)]
    state = attention_state(c, n, prompt, inert, any(k))
    return Scalars(
        B, T, Bp, Tp, out, d, max(n, default=0), max(seq_lens, default=0), int(state), sum(map(bool, placeholders))
    )
