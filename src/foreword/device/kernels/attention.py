"""Paged attention over the rows' own block tables (K4): each request to its own keys, as far as each query sees."""

import triton
import triton.language as tl

from foreword.device.kernels.fp8 import decode
from foreword.device.kernels.places import (
    GROUP_BLOCK_SIZE,
    GROUP_SIZE,
    GROUP_TABLE_AT,
    GROUP_WIDTH,
    PACKET_NUM_REQS,
    PACKET_NUM_TOKENS,
    PACKET_NUM_TOKENS_PADDED,
    ROW_NUM_COMPUTED_TOKENS,
    plan_of,
)

NEGATIVE = tl.constexpr(-1.0e30)  # a score that is not seen: no infinities, whose difference would be NaN


@triton.jit(do_not_specialize=["num_splits"])  # it differs from step to step: one compilation serves all
def attend(
    state, packet, groups, group, records_at, record_size, queries, keys, values, key_scales, value_scales, sinks, out,
    partial, scale, softcap, num_splits, key_stride, value_stride, scale_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    FP8_UNIT: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Attend with queries in tiles of Q = BLOCK_M // N tokens of one request, with N = min(BLOCK_M, HEADS // KV_HEADS)
    of the heads that share keys.

    Grid (Tp // Q + Bp, KV_HEADS · parts, num_splits): tile i is of the last request b with query_start[b] // Q + b ≤ i;
    each of parts = ceil(HEADS / KV_HEADS / N) programs has N of the heads of a key.
    queries: [Tp, HEADS, DIM]; out: [Tp, HEADS, VALUE_DIM]. keys, values: blocks of [block size, KV_HEADS, DIM or
    VALUE_DIM], key_stride or value_stride apart.
    sinks: [HEADS], a score per head that takes its part of the softmax and has no value. A query at position p sees the
    keys in (p − WINDOW, p], if CHUNKED in [p − p mod WINDOW, p]; WINDOW 0: all up to p.
    FP8, key_scales, value_scales: see `write_keys`.
    DOT: the type of the products' operands; sums are float32 always.
    SPLIT: each of num_splits programs takes a part of the keys and writes to partial, float32
    [num_splits, Tp, HEADS, VALUE_DIM + 2]: values not divided by the sum, the maximum, the sum; `merge_splits` follows.
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    N: tl.constexpr = SHARED if SHARED < BLOCK_M else BLOCK_M
    PARTS: tl.constexpr = (SHARED + N - 1) // N
    Q: tl.constexpr = BLOCK_M // N
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    split = tl.program_id(2)
    num_reqs = tl.load(packet + PACKET_NUM_REQS)
    rows, query_start, _, _, _ = plan_of(packet)
    low = 0
    high = num_reqs
    while low < high:  # the number of requests whose first tile is at most this one
        middle = (low + high) // 2
        first = tl.load(query_start + middle) // Q + middle
        low = tl.where(first <= tile, middle + 1, low)
        high = tl.where(first <= tile, high, middle)
    b = low - 1
    start = tl.load(query_start + b, mask=b >= 0, other=0)
    n = tl.load(query_start + b + 1, mask=b >= 0, other=0) - start
    local = (tile - start // Q - b) * Q
    row = tl.load(rows + b, mask=b >= 0, other=-1)
    if (local < n) & (row >= 0):
        computed = tl.load(state + records_at + row.to(tl.int64) * record_size + ROW_NUM_COMPUTED_TOKENS)
        record = groups + group * GROUP_SIZE
        table = state + tl.load(record + GROUP_TABLE_AT) + row.to(tl.int64) * tl.load(record + GROUP_WIDTH)
        size = tl.load(record + GROUP_BLOCK_SIZE)
        m_at = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_DIM)
        dv = tl.arange(0, BLOCK_VALUE)
        i = local + m_at // N
        of_key = tl.program_id(1) % PARTS * N + m_at % N
        head = kv_head * SHARED + of_key
        real = (i < n) & (m_at < Q * N) & (of_key < SHARED)
        position = computed + i
        token = (start + i).to(tl.int64)
        at = (token * HEADS + head)[:, None] * DIM + d[None, :]
        q = tl.load(queries + at, mask=real[:, None] & (d < DIM)[None, :], other=0.0).to(DOT)
        top = tl.full([BLOCK_M], NEGATIVE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # noqa: SIM102 (a condition of the compiler, then one of the program)
            if split == 0:
                top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
                total += 1.0
        sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
        end = computed + tl.minimum(local + Q, n)
        begin = 0
        first = 0  # the lowest key that a query of the tile sees
        if WINDOW > 0:
            lowest = computed + local
            first = lowest - lowest % WINDOW if CHUNKED else tl.maximum(lowest - WINDOW + 1, 0)
            begin = first // BLOCK_N * BLOCK_N
        if SPLIT:
            part = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
            begin = begin + split * part
            end = tl.minimum(end, begin + part)
        for j in range(begin, end, BLOCK_N):
            key = j + tl.arange(0, BLOCK_N)
            inside = key < end
            if WINDOW > 0:  # blocks below the window may be another request's by this time
                inside = inside & (key >= first)
            block = tl.load(table + key // size, mask=inside, other=0).to(tl.int64)
            head_at = key % size * KV_HEADS + kv_head
            key_at = block * key_stride + head_at * DIM
            k = tl.load(keys + key_at[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
            if FP8:
                k = decode(k, FP8_UNIT)
            score = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
            if FP8:
                scale_at = block * scale_stride + head_at
                score *= tl.load(key_scales + scale_at, mask=inside, other=0.0)[None, :]
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            seen = (key[None, :] <= position[:, None]) & inside[None, :] & real[:, None]
            if WINDOW > 0:
                begin_of = position - position % WINDOW if CHUNKED else position - WINDOW + 1
                seen = seen & (key[None, :] >= begin_of[:, None])
            score = tl.where(seen, score, NEGATIVE)
            new = tl.maximum(top, tl.max(score, 1))
            weight = tl.where(seen, tl.exp(score - new[:, None]), 0.0)
            kept = tl.exp(top - new)
            total = total * kept + tl.sum(weight, 1)
            value_at = (block * value_stride + head_at * VALUE_DIM)[:, None] + dv[None, :]
            v = tl.load(values + value_at, mask=inside[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
            if FP8:
                v = decode(v, FP8_UNIT)
                weight *= tl.load(value_scales + scale_at, mask=inside, other=0.0)[None, :]
            if FP8 and (tl.float16 == DOT):  # a weight times a scale is below the numbers of float16
                added = tl.dot(weight, v, input_precision="tf32")
            else:
                added = tl.dot(weight.to(DOT), v.to(DOT), input_precision="ieee")
            sums = sums * kept[:, None] + added
            top = new
        valid = real[:, None] & (dv < VALUE_DIM)[None, :]
        if SPLIT:
            num_tokens = tl.load(packet + PACKET_NUM_TOKENS_PADDED).to(tl.int64)
            to = partial + ((split * num_tokens + token) * HEADS + head) * (VALUE_DIM + 2)
            tl.store(to[:, None] + dv[None, :], sums, mask=valid)
            tl.store(to + VALUE_DIM, top, mask=real)
            tl.store(to + VALUE_DIM + 1, total, mask=real)
        else:
            to = out + (token * HEADS + head)[:, None] * VALUE_DIM + dv[None, :]
            total = tl.where(real, total, 1.0)
            tl.store(to, (sums / total[:, None]).to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_splits"])  # it differs from step to step: one compilation serves all
def merge_splits(
    packet, partial, out, num_splits, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr
):
    """Combine the parts that `attend` wrote into out[t, h]. Grid (Tp, HEADS)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if t < tl.load(packet + PACKET_NUM_TOKENS):
        dv = tl.arange(0, BLOCK_VALUE)
        num_tokens = tl.load(packet + PACKET_NUM_TOKENS_PADDED).to(tl.int64)
        top = tl.full([1], NEGATIVE, tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([BLOCK_VALUE], tl.float32)
        for split in range(num_splits):
            part = partial + ((split * num_tokens + t) * HEADS + head) * (VALUE_DIM + 2)
            here = tl.load(part + VALUE_DIM)
            new = tl.maximum(top, here)
            kept = tl.exp(top - new)
            weight = tl.exp(here - new)
            sums = sums * kept + tl.load(part + dv, mask=dv < VALUE_DIM, other=0.0) * weight
            total = total * kept + tl.load(part + VALUE_DIM + 1) * weight
            top = new
        total = tl.where(total > 0.0, total, 1.0)  # 0 of a cancelled request, to which nothing attends
        tl.store(
            out + (t * HEADS + head) * VALUE_DIM + dv, (sums / total).to(out.dtype.element_ty), mask=dv < VALUE_DIM
        )
