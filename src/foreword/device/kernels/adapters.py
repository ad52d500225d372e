"""The changes of LoRA adapters to a product: each token through the two factors of its own adapter (K7)."""

import triton
import triton.language as tl

from foreword.device.kernels.places import PACKET_NUM_TOKENS


@triton.jit
def shrink(
    packet, adapters, x, a, inner, num_inputs, x_stride, a_columns, rank,
    BLOCK_RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute inner[t, r] = Σ_i a[adapter of t, r, i] x[t, i], in float32. Grid (Tp, ceil(rank / BLOCK_RANK)).

    adapters: int32 [Tp], −1 for none, whose inner is not written. x: rows of num_inputs, x_stride apart.
    a: [adapters, rank, a_columns]. inner: float32 [Tp, rank].
    """
    t = tl.program_id(0)
    adapter = tl.load(adapters + t, mask=t < tl.load(packet + PACKET_NUM_TOKENS), other=-1)
    if adapter >= 0:
        r = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        of_rank = a + (adapter.to(tl.int64) * rank + r) * a_columns
        sums = tl.zeros([BLOCK_RANK], tl.float32)
        for j in range(0, num_inputs, BLOCK):
            i = j + tl.arange(0, BLOCK)
            values = tl.load(x + t.to(tl.int64) * x_stride + i, mask=i < num_inputs, other=0.0).to(tl.float32)
            inside = (r < rank)[:, None] & (i < num_inputs)[None, :]
            factor = tl.load(of_rank[:, None] + i[None, :], mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(factor * values[None, :], 1)
        tl.store(inner + t.to(tl.int64) * rank + r, sums, mask=r < rank)


@triton.jit
def expand(
    packet, adapters, inner, b, out, num_outputs, out_stride, rank, BLOCK_RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """Add to out[t, o] the sum Σ_r b[adapter of t, o, r] inner[t, r]. Grid (Tp, ceil(num_outputs / BLOCK)).

    b: [adapters, num_outputs, rank]. out: rows of num_outputs, out_stride apart.
    """
    t = tl.program_id(0)
    adapter = tl.load(adapters + t, mask=t < tl.load(packet + PACKET_NUM_TOKENS), other=-1)
    if adapter >= 0:
        o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        of_output = b + (adapter.to(tl.int64) * num_outputs + o) * rank
        sums = tl.zeros([BLOCK], tl.float32)
        for j in range(0, rank, BLOCK_RANK):
            r = j + tl.arange(0, BLOCK_RANK)
            values = tl.load(inner + t.to(tl.int64) * rank + r, mask=r < rank, other=0.0)
            inside = (o < num_outputs)[:, None] & (r < rank)[None, :]
            factor = tl.load(of_output[:, None] + r[None, :], mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(factor * values[None, :], 1)
        to = out + t.to(tl.int64) * out_stride + o
        before = tl.load(to, mask=o < num_outputs, other=0.0).to(tl.float32)
        tl.store(to, (before + sums).to(out.dtype.element_ty), mask=o < num_outputs)
