"""The tensors of a step from the arena and the packet (K1): `foreword.batch.prepare.backends.loops` in one launch."""

import triton
import triton.language as tl

from foreword.batch.step.layout import FIELDS
from foreword.device.kernels.places import (
    GROUP_BLOCK_SIZE,
    GROUP_CP_INTERLEAVE,
    GROUP_CP_RANK,
    GROUP_CP_SIZE,
    GROUP_SIZE,
    GROUP_TABLE_AT,
    GROUP_TOKENS_PER_BLOCK,
    GROUP_WIDTH,
    PACKET_NUM_LOGITS,
    PACKET_NUM_REQS,
    PACKET_NUM_REQS_PADDED,
    PACKET_NUM_TOKENS,
    PACKET_NUM_TOKENS_PADDED,
    ROW_LORA_ID,
    ROW_NUM_COMPUTED_TOKENS,
    ROW_NUM_TOKENS,
    ROW_PREFILL_LEN,
    ROW_ROPE_DELTA,
    plan_of,
)

NO_SLOT = tl.constexpr(FIELDS["slot_mapping"].padding)
NO_ROW = tl.constexpr(FIELDS["idx_mapping"].padding)
NO_LOGITS = tl.constexpr(FIELDS["logits_indices"].padding)


@triton.jit(do_not_specialize=["token_programs"])  # it differs from step to step: one compilation serves all
def prepare_step(
    state, tokens, packet, groups, max_model_len, records_at, record_size, max_tokens, max_logits, token_programs,
    out, cp_size, cp_rank, cp_interleave, G: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write every tensor by token, then by request, padding included: the entries up to Tp, Bp and, of logits, Tp.

    Grid (token_programs + ceil((Bp + 1) / BLOCK),), token_programs ≥ ceil(Tp / BLOCK). out: `layout.StepTensors`, whose
    shapes are those of the table; slot_mapping is [G, max_tokens].
    WIDTH: 1 + the most drafts of a request. cp_*: context parallelism of the states; 1, 0, 1 without.
    """
    num_reqs = tl.load(packet + PACKET_NUM_REQS)
    num_tokens = tl.load(packet + PACKET_NUM_TOKENS)
    reqs = tl.load(packet + PACKET_NUM_REQS_PADDED)
    padded = tl.load(packet + PACKET_NUM_TOKENS_PADDED)
    rows, query_start, cu_drafts, owner, draft_ids = plan_of(packet)
    program = tl.program_id(0)
    if program < token_programs:
        t = program * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] tokens
        is_token = t < num_tokens
        in_step = t < padded
        of = tl.load(owner + t, mask=is_token, other=0)
        token_row = tl.load(rows + of, mask=is_token, other=-1)
        is_live = token_row >= 0
        token_row = tl.maximum(token_row, 0).to(tl.int64)
        token_record = state + records_at + token_row * record_size
        position = (
            tl.load(token_record + ROW_NUM_COMPUTED_TOKENS, mask=is_live, other=0)
            + t
            - tl.load(query_start + of, mask=is_token, other=0)
        )
        position = tl.where(is_token, position, 0)
        known = tl.load(token_record + ROW_NUM_TOKENS, mask=is_live, other=0)
        is_draft = is_live & (position >= known)
        token = tl.load(tokens + token_row * max_model_len + position, mask=is_live & (position < known), other=0)
        token = tl.where(token < 0, ~token, token)
        nth = tl.load(cu_drafts + of, mask=is_draft, other=0) + position - known
        exists = nth < tl.load(cu_drafts + of + 1, mask=is_draft, other=0)  # not after a step that gave no token
        draft = tl.load(draft_ids + nth, mask=is_draft & exists, other=0)
        tl.store(out.input_ids + t, tl.where(is_draft, tl.maximum(draft, 0), token), mask=in_step)
        tl.store(out.positions + t, position.to(tl.int64), mask=in_step)
        tl.store(out.req_indices + t, of, mask=in_step)
        tl.store(out.lora_tokens + t, tl.load(token_record + ROW_LORA_ID, mask=is_live, other=0), mask=in_step)
        rotary = position + tl.load(token_record + ROW_ROPE_DELTA, mask=is_live, other=0)
        tl.store(out.rope_positions + t, rotary.to(tl.int64), mask=in_step)
        num_logits = tl.load(packet + PACKET_NUM_LOGITS)
        pad = (t >= num_logits) & in_step & (t < max_logits)
        tl.store(out.logits_indices + t, tl.full([BLOCK], NO_LOGITS, tl.int64), mask=pad)
        tl.store(out.expanded_idx_mapping + t, tl.full([BLOCK], NO_ROW, tl.int32), mask=pad)
        for g in tl.static_range(G):
            group = groups + g * GROUP_SIZE
            table_at = tl.load(group + GROUP_TABLE_AT)
            width = tl.load(group + GROUP_WIDTH)
            size = tl.load(group + GROUP_BLOCK_SIZE)
            per_block = tl.load(group + GROUP_TOKENS_PER_BLOCK)
            ranks = tl.load(group + GROUP_CP_SIZE)
            rank = tl.load(group + GROUP_CP_RANK)
            interleave = tl.load(group + GROUP_CP_INTERLEAVE)
            offset = position % per_block
            owned = is_live & (offset // interleave % ranks == rank)
            block = tl.load(state + table_at + token_row * width + position // per_block, mask=owned, other=0)
            local = offset // (interleave * ranks) * interleave + offset % interleave
            slot = tl.where(owned, block.to(tl.int64) * size + local, NO_SLOT)
            tl.store(out.slot_mapping + g * max_tokens + t, slot, mask=in_step)
    else:
        b = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] requests
        real = b < num_reqs
        inside = b < reqs
        row = tl.load(rows + b, mask=real, other=-1)
        live = row >= 0
        handle = tl.where(real, tl.where(live, row, ~row), NO_ROW)
        record = state + records_at + tl.maximum(row, 0).to(tl.int64) * record_size
        computed = tl.load(record + ROW_NUM_COMPUTED_TOKENS, mask=live, other=0)
        start = tl.load(query_start + b, mask=b <= reqs, other=0)
        end = tl.load(query_start + b + 1, mask=real, other=0)
        length = tl.where(real, computed + end - start, 0)
        rest = length % (cp_interleave * cp_size) - cp_rank * cp_interleave
        local = length // (cp_interleave * cp_size) * cp_interleave + tl.minimum(tl.maximum(rest, 0), cp_interleave)
        drafts = tl.load(cu_drafts + b, mask=b <= reqs, other=0)
        k = tl.load(cu_drafts + b + 1, mask=real, other=0) - drafts
        tl.store(out.idx_mapping + b, handle, mask=inside)
        tl.store(out.num_computed_tokens + b, computed, mask=inside)
        tl.store(out.is_prefilling + b, computed < tl.load(record + ROW_PREFILL_LEN, mask=live, other=0), mask=inside)
        tl.store(out.seq_lens + b, length, mask=inside)
        tl.store(out.dcp_local_seq_lens + b, local, mask=inside)
        tl.store(out.query_start_loc + b, start, mask=b <= reqs)
        first = tl.minimum(b, num_reqs) + drafts
        tl.store(out.cu_num_logits + b, first, mask=b <= reqs)
        for j in tl.static_range(WIDTH):
            exists = real & (j <= k)
            tl.store(out.logits_indices + first + j, (end - 1 - k + j).to(tl.int64), mask=exists)
            tl.store(out.expanded_idx_mapping + first + j, handle, mask=exists)
            tl.store(out.expanded_local_pos + first + j, tl.zeros([BLOCK], tl.int32) + j, mask=exists)
