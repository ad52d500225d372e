"""Queries and keys normed and rotated, keys and values written to the cache: one launch per layer (K3)."""

import triton
import triton.language as tl

from foreword.device.kernels.fp8 import LARGEST, encode
from foreword.device.kernels.places import PACKET_NUM_TOKENS

SMALLEST = tl.constexpr(1e-30)  # the least divisor of a head: no division by zero


@triton.jit
def write_keys(
    packet, qkv, queries, keys, values, key_scales, value_scales, slot_mapping, positions, cos, sin, q_norm, k_norm,
    eps, qkv_stride, block_size, key_stride, value_stride, scale_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write, for each token, queries[t] = rope(norm(q)), and at its slot keys = rope(norm(k)), values = v. Grid (Tp,
    heads), with HEADS + 2 · KV_HEADS programs in the second axis. Without the last KV_HEADS of them, qkv has no values,
    and none are written.

    qkv: rows of q, then k, then v, HEADS · DIM + KV_HEADS · (DIM + VALUE_DIM) or more, qkv_stride apart. queries: [Tp,
    HEADS, DIM]. keys, values: blocks of [block_size, KV_HEADS, DIM or VALUE_DIM], key_stride or value_stride apart; a
    slot of −1 is not written. cos, sin: float32 [M, PAIRS], the
    rotation of the pairs (j, j + PAIRS) at each position, scale included; PAIRS 0: none.
    FP8: keys and values are uint8 (`foreword.device.kernels.fp8`), divided by a scale of each token and head:
    key_scales, value_scales: float32 blocks of [block_size, KV_HEADS], scale_stride apart.
    NORM: x / sqrt(mean(x²) + eps) · w first, with q_norm and k_norm [DIM].
    """
    t = tl.program_id(0)
    head = tl.program_id(1)
    if t < tl.load(packet + PACKET_NUM_TOKENS):
        base = qkv + t.to(tl.int64) * qkv_stride
        d = tl.arange(0, BLOCK_DIM)
        slot = tl.load(slot_mapping + t)
        block = slot // block_size
        offset = slot % block_size
        if head < HEADS + KV_HEADS:
            base += head * DIM
            inside = d < DIM
            x = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
            other_at = tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))
            other = tl.load(base + other_at, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
                weight = tl.where(head < HEADS, q_norm, k_norm)
                x = x * inverse * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
                other = other * inverse * tl.load(weight + other_at, mask=inside, other=0.0).to(tl.float32)
            if PAIRS > 0:
                angle = tl.load(positions + t) * PAIRS + d % PAIRS
                rotates = d < 2 * PAIRS
                c = tl.load(cos + angle, mask=rotates, other=1.0)
                s = tl.load(sin + angle, mask=rotates, other=0.0)
                x = x * c + tl.where(d < PAIRS, -other, other) * s
            if head < HEADS:
                to = queries + (t.to(tl.int64) * HEADS + head) * DIM
                tl.store(to + d, x.to(queries.dtype.element_ty), mask=inside)
            elif slot >= 0:
                to = keys + block * key_stride + (offset * KV_HEADS + head - HEADS) * DIM
                if FP8:
                    scale = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST) / LARGEST
                    tl.store(key_scales + block * scale_stride + offset * KV_HEADS + head - HEADS, scale)
                    tl.store(to + d, encode(x / scale), mask=inside)
                else:
                    tl.store(to + d, x.to(keys.dtype.element_ty), mask=inside)
        elif slot >= 0:
            kv_head = head - HEADS - KV_HEADS
            inside = d < VALUE_DIM
            v = tl.load(base + (HEADS + KV_HEADS) * DIM + kv_head * VALUE_DIM + d, mask=inside, other=0.0)
            to = values + block * value_stride + (offset * KV_HEADS + kv_head) * VALUE_DIM
            if FP8:
                number = v.to(tl.float32)
                scale = tl.maximum(tl.max(tl.abs(number), 0), SMALLEST) / LARGEST
                tl.store(value_scales + block * scale_stride + offset * KV_HEADS + kv_head, scale)
                tl.store(to + d, encode(number / scale), mask=inside)
            else:
                tl.store(to + d, v.to(values.dtype.element_ty), mask=inside)
