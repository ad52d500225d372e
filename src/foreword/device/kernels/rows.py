"""Kernels over the arena: the packet's changes (K0), gathered block tables (K2), the samples (K6).

`foreword.device.layout` describes arena and packet.
"""

import triton
import triton.language as tl

from foreword.device.kernels.places import (
    GROUP_NUM_BLOCKS_ENTRY,
    GROUP_SIZE,
    GROUP_SLIDING_WINDOW,
    GROUP_TABLE_AT,
    GROUP_TOKENS_PER_BLOCK,
    GROUP_WIDTH,
    PACKET_NUM_REQS,
    PACKET_NUM_RUNS,
    PACKET_RUNS_AT,
    ROW_NUM_COMPUTED_TOKENS,
    ROW_NUM_TOKENS,
    plan_of,
)


@triton.jit
def apply_runs(state, tokens, packet, max_model_len, BLOCK: tl.constexpr):
    """Copy arena[to : to + length] = packet[from : from + length] for each run of the packet. A negative ``to`` is
    ~row: the tokens of that row from position packet[from − 1] on. Any grid (programs,).
    """
    count = tl.load(packet + PACKET_NUM_RUNS)
    runs = packet + tl.load(packet + PACKET_RUNS_AT)  # [count, 3]
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        to = tl.load(runs + 3 * i)
        length = tl.load(runs + 3 * i + 1)
        source = tl.load(runs + 3 * i + 2)
        target = state + to
        if to < 0:
            target = tokens + (~to).to(tl.int64) * max_model_len + tl.load(packet + source - 1)
        for j in range(0, length, BLOCK):
            at = j + tl.arange(0, BLOCK)
            inside = at < length
            tl.store(target + at, tl.load(packet + source + at, mask=inside, other=0), mask=inside)


@triton.jit
def gather_tables(state, packet, groups, g, records_at, record_size, null_block, out, num_blocks, BLOCK: tl.constexpr):
    """Write to out[b] the blocks of the request's row in group g: null past the end and wholly below the sliding
    window.

    out: int32 [Bp, K]; num_blocks: int32 [Bp]. Grid (Bp, ceil(K / BLOCK)).
    """
    b = tl.program_id(0)
    group = groups + g * GROUP_SIZE
    table_at = tl.load(group + GROUP_TABLE_AT)
    width = tl.load(group + GROUP_WIDTH)
    per_block = tl.load(group + GROUP_TOKENS_PER_BLOCK)
    window = tl.load(group + GROUP_SLIDING_WINDOW)
    real = b < tl.load(packet + PACKET_NUM_REQS)
    rows, _, _, _, _ = plan_of(packet)
    row = tl.load(rows + b)
    real = real & (row >= 0)
    row = tl.maximum(row, 0)
    record = state + records_at + row.to(tl.int64) * record_size
    held = tl.where(real, tl.load(record + tl.load(group + GROUP_NUM_BLOCKS_ENTRY)), 0)
    computed = tl.load(record + ROW_NUM_COMPUTED_TOKENS)
    below = tl.where(window >= 2, tl.maximum(computed - window + 1, 0) // per_block, 0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(state + table_at + row.to(tl.int64) * width + k, mask=(k < held) & (k >= below), other=null_block)
    tl.store(out + b.to(tl.int64) * width + k, blocks, mask=k < width)
    if tl.program_id(1) == 0:
        tl.store(num_blocks + b, held)


@triton.jit
def commit_samples(
    state, tokens, packet, sampled, max_model_len, records_at, record_size, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Record what the step computed and sampled (`foreword.batch.prepare.commit`). Grid (ceil(Bp / BLOCK),).

    sampled: int32 [Bp, WIDTH], padded with −1.
    """
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] requests
    live = b < tl.load(packet + PACKET_NUM_REQS)
    rows, query_start, cu_drafts, _, _ = plan_of(packet)
    row = tl.load(rows + b, mask=live, other=-1)
    live = row >= 0
    row = tl.maximum(row, 0)
    n = tl.load(query_start + b + 1, mask=live, other=0) - tl.load(query_start + b, mask=live, other=0)
    k = tl.load(cu_drafts + b + 1, mask=live, other=0) - tl.load(cu_drafts + b, mask=live, other=0)
    record = state + records_at + row.to(tl.int64) * record_size
    known = tl.load(record + ROW_NUM_TOKENS, mask=live, other=0)
    end = tl.load(record + ROW_NUM_COMPUTED_TOKENS, mask=live, other=0) + n
    samples = live & (end - k >= known)
    tokens += row.to(tl.int64) * max_model_len + known
    taken = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(WIDTH):
        token = tl.load(sampled + b * WIDTH + j, mask=samples, other=-1)
        take = token >= 0
        tl.store(tokens + j, token, mask=take & (known + j < max_model_len))
        taken += take.to(tl.int32)
    rejected = tl.where(samples, k - tl.maximum(taken - 1, 0), 0)
    tl.store(record + ROW_NUM_COMPUTED_TOKENS, end - rejected, mask=live)
    tl.store(record + ROW_NUM_TOKENS, known + taken, mask=live)
