"""The tensors of a step from the arena and the packet (K1): `foreword.batch.prepare.backends.loops` in one launch."""

import triton
import triton.language as tl

from foreword.device import layout

HEADER = tl.constexpr(layout.HEADER_SIZE)
GROUP = tl.constexpr(layout.GROUP_SIZE)
NUM_TOKENS = tl.constexpr(layout.NUM_TOKENS)
NUM_COMPUTED = tl.constexpr(layout.NUM_COMPUTED)
LORA_ID = tl.constexpr(layout.LORA_ID)
ROPE_DELTA = tl.constexpr(layout.ROPE_DELTA)
PREFILL_LEN = tl.constexpr(layout.PREFILL_LEN)


@triton.jit
def prepare_step(
    state, packet, groups, tokens_at, max_model_len, records_at, record_size, max_tokens, max_logits, token_programs,
    input_ids, positions, req_indices, lora_tokens, rope_positions, slot_mapping,
    idx_mapping, num_computed_tokens, is_prefilling, seq_lens, dcp_local_seq_lens, query_start_loc, cu_num_logits,
    logits_indices, expanded_idx_mapping, expanded_local_pos,
    cp_size, cp_rank, cp_interleave,
    G: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every tensor by token, then by request, padding included: the entries up to Tp, Bp and, of logits, Tp.

    Grid (token_programs + ceil((Bp + 1) / BLOCK),), token_programs ≥ ceil(Tp / BLOCK). slot_mapping: [G, max_tokens].
    WIDTH: 1 + the most drafts of a request. cp_*: context parallelism of the states; 1, 0, 1 without.
    """
    num_reqs = tl.load(packet)
    num_tokens = tl.load(packet + 1)
    reqs = tl.load(packet + 2)
    padded = tl.load(packet + 3)
    rows = packet + HEADER
    query_start = rows + reqs
    cu_drafts = query_start + reqs + 1
    owner = cu_drafts + reqs + 1
    draft_ids = owner + num_tokens
    program = tl.program_id(0)
    if program < token_programs:
        t = program * BLOCK + tl.arange(0, BLOCK)
        is_token = t < num_tokens
        in_step = t < padded
        of = tl.load(owner + t, mask=is_token, other=0)
        token_row = tl.load(rows + of, mask=is_token, other=-1)
        is_live = token_row >= 0
        token_row = tl.maximum(token_row, 0).to(tl.int64)
        token_record = state + records_at + token_row * record_size
        position = (
            tl.load(token_record + NUM_COMPUTED, mask=is_live, other=0)
            + t
            - tl.load(query_start + of, mask=is_token, other=0)
        )
        position = tl.where(is_token, position, 0)
        known = tl.load(token_record + NUM_TOKENS, mask=is_live, other=0)
        is_draft = is_live & (position >= known)
        token = tl.load(
            state + tokens_at + token_row * max_model_len + position, mask=is_live & (position < known), other=0
        )
        nth = tl.load(cu_drafts + of, mask=is_draft, other=0) + position - known
        exists = nth < tl.load(cu_drafts + of + 1, mask=is_draft, other=0)  # not after a step that gave no token
        draft = tl.load(draft_ids + nth, mask=is_draft & exists, other=0)
        tl.store(input_ids + t, tl.where(is_draft, tl.maximum(draft, 0), token), mask=in_step)
        tl.store(positions + t, position.to(tl.int64), mask=in_step)
        tl.store(req_indices + t, of, mask=in_step)
        tl.store(lora_tokens + t, tl.load(token_record + LORA_ID, mask=is_live, other=0), mask=in_step)
        rotary = position + tl.load(token_record + ROPE_DELTA, mask=is_live, other=0)
        tl.store(rope_positions + t, rotary.to(tl.int64), mask=in_step)
        num_logits = tl.load(packet + 4)
        pad = (t >= num_logits) & in_step & (t < max_logits)
        tl.store(logits_indices + t, tl.zeros([BLOCK], tl.int64), mask=pad)
        tl.store(expanded_idx_mapping + t, tl.full([BLOCK], -1, tl.int32), mask=pad)
        for g in tl.static_range(G):
            group = groups + g * GROUP
            table_at = tl.load(group)
            width = tl.load(group + 2)
            size = tl.load(group + 3)
            per_block = tl.load(group + 4)
            ranks = tl.load(group + 5)
            rank = tl.load(group + 6)
            interleave = tl.load(group + 7)
            offset = position % per_block
            owned = is_live & (offset // interleave % ranks == rank)
            block = tl.load(state + table_at + token_row * width + position // per_block, mask=owned, other=0)
            local = offset // (interleave * ranks) * interleave + offset % interleave
            slot = tl.where(owned, block.to(tl.int64) * size + local, -1)
            tl.store(slot_mapping + g * max_tokens + t, slot, mask=in_step)
    else:
        b = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        real = b < num_reqs
        inside = b < reqs
        row = tl.load(rows + b, mask=real, other=-1)
        live = row >= 0
        handle = tl.where(real, tl.where(live, row, ~row), -1)
        record = state + records_at + tl.maximum(row, 0).to(tl.int64) * record_size
        computed = tl.load(record + NUM_COMPUTED, mask=live, other=0)
        start = tl.load(query_start + b, mask=b <= reqs, other=0)
        end = tl.load(query_start + b + 1, mask=real, other=0)
        length = tl.where(real, computed + end - start, 0)
        rest = length % (cp_interleave * cp_size) - cp_rank * cp_interleave
        local = length // (cp_interleave * cp_size) * cp_interleave + tl.minimum(tl.maximum(rest, 0), cp_interleave)
        drafts = tl.load(cu_drafts + b, mask=b <= reqs, other=0)
        k = tl.load(cu_drafts + b + 1, mask=real, other=0) - drafts
        tl.store(idx_mapping + b, handle, mask=inside)
        tl.store(num_computed_tokens + b, computed, mask=inside)
        tl.store(is_prefilling + b, computed < tl.load(record + PREFILL_LEN, mask=live, other=0), mask=inside)
        tl.store(seq_lens + b, length, mask=inside)
        tl.store(dcp_local_seq_lens + b, local, mask=inside)
        tl.store(query_start_loc + b, start, mask=b <= reqs)
        first = tl.minimum(b, num_reqs) + drafts
        tl.store(cu_num_logits + b, first, mask=b <= reqs)
        for j in tl.static_range(WIDTH):
            exists = real & (j <= k)
            tl.store(logits_indices + first + j, (end - 1 - k + j).to(tl.int64), mask=exists)
            tl.store(expanded_idx_mapping + first + j, handle, mask=exists)
            tl.store(expanded_local_pos + first + j, tl.zeros([BLOCK], tl.int32) + j, mask=exists)
