"""Every adapter must suffice for attention: a kernel that has its arguments and a paged cache alone must equal plain
attention of each request over its own contiguous keys and values.

The cache starts as NaN, the null block stays NaN, and blocks wholly below a window are null, so that reading anything
that is not the request's own shows in the result.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from batch_rig import states_and_buffers

from foreword.batch import KVGroup, NewRequest, prepare_inputs
from foreword.batch.adapters import (
    chosen_slots,
    chunked_local,
    common_attention_metadata,
    dense_inputs,
    indexer_inputs,
    nano_vllm_context,
    token_tables,
)
from foreword.errors import ConfigError, PlanError

HEAD = 4
GROUPS = [
    KVGroup(block_size=4),
    KVGroup(block_size=8, kernel_block_size=2),
    KVGroup(block_size=2, sliding_window=5),
    KVGroup(block_size=16, sliding_window=1),
]


def softmax_attention(q, k, v):
    """One query over the keys it sees."""
    scores = k @ q
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ v


@dataclass
class Step:
    batch: object
    q: np.ndarray  # [T, HEAD]
    fresh: list  # per group: the step's own (k, v), [T, HEAD] each
    caches: list  # per group: (k, v), [slots, HEAD] each
    plain: list  # per group: the answer, [T, HEAD]
    chunked: list  # the answer of chunked-local attention with chunks of 16


def plain(q, k, v, position, window, chunk=None):
    low = 0 if window is None else max(0, position - window + 1)
    if chunk is not None:
        low = max(low, position // chunk * chunk)
    return softmax_attention(q, k[low : position + 1], v[low : position + 1])


def random_step(seed, kinds=("prefill", "chunk", "resume", "decode", "verify"), pad=False):
    rng = np.random.default_rng(seed)
    states, buffers = states_and_buffers(*GROUPS, rows=8, length=64, vocab_size=100, drafts=3, tokens=400)
    num_blocks = 1 + 8 * 64
    free = [rng.permutation(np.arange(1, num_blocks)).tolist() for _ in GROUPS]
    caches = [tuple(np.full((num_blocks * g.block_size, HEAD), np.nan) for _ in range(2)) for g in GROUPS]
    plan, drafts, keys = {}, {}, {}
    for r in range(int(rng.integers(1, 7))):
        rid, kind = f"r{r}", rng.choice(kinds)
        prompt = int(rng.integers(1, 40))
        match kind:
            case "prefill":
                computed, scheduled, outputs, k = 0, prompt, 0, 0
            case "chunk":
                computed = int(rng.integers(0, prompt))
                scheduled, outputs, k = int(rng.integers(1, prompt - computed + 1)), 0, 0
            case "resume":
                outputs = int(rng.integers(1, 8))
                computed = int(rng.integers(0, prompt + outputs))
                scheduled, k = prompt + outputs - computed, 0
            case "decode":
                outputs, k = int(rng.integers(1, 8)), 0
                computed, scheduled = prompt + outputs - 1, 1
            case "verify":
                outputs, k = int(rng.integers(1, 8)), int(rng.integers(1, 4))
                computed, scheduled = prompt + outputs - 1, 1 + k
        total = computed + scheduled
        kv = [(rng.standard_normal((total, HEAD)), rng.standard_normal((total, HEAD))) for _ in GROUPS]
        tables = []
        for g, group in enumerate(GROUPS):
            S, W = group.block_size, group.sliding_window
            table = [free[g].pop() for _ in range(-(-total // S))]
            for p in range(computed):
                for cache, values in zip(caches[g], kv[g], strict=True):
                    cache[table[p // S] * S + p % S] = values[p]
            if W is not None:  # blocks that no query of this step can see are null, and may belong to other requests
                table = [0 if (i + 1) * S <= computed - W + 1 else b for i, b in enumerate(table)]
            tables.append(table)
        states.add_request(
            NewRequest(rid, rng.integers(1, 100, prompt), tables, rng.integers(1, 100, outputs), computed)
        )
        plan[rid], keys[rid] = scheduled, kv
        if k:
            drafts[rid] = rng.integers(1, 100, k).tolist()
    T, B = sum(plan.values()), len(plan)
    batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=(T + 5, min(B + 2, 8)) if pad else None)
    q = rng.standard_normal((T, HEAD))
    fresh, answers, chunked = [], [], []
    owner = [(batch.req_ids[b], int(p)) for b, p in zip(batch.req_indices, batch.positions[:T], strict=True)]
    for g, group in enumerate(GROUPS):
        new = tuple(np.array([keys[rid][g][i][p] for rid, p in owner]) for i in range(2))
        for cache, values in zip(caches[g], new, strict=True):
            cache[batch.slot_mapping[g][:T]] = values
        fresh.append(new)
        mine = [(q[t], *keys[rid][g], p) for t, (rid, p) in enumerate(owner)]
        answers.append(np.array([plain(*x, group.sliding_window) for x in mine]))
        chunked.append(np.array([plain(*x, None, 16) for x in mine]))
    return Step(batch, q, fresh, caches, answers, chunked)


# -- kernels: each sees an adapter's arguments, the queries and the cache, nothing else


def paged_varlen(q, cache, cu_q, seqlens_k, tables, S, window):
    """Causal attention aligned to the last key, over pages."""
    out = np.full_like(q, np.nan)
    for b in range(len(cu_q) - 1):
        n, end = cu_q[b + 1] - cu_q[b], seqlens_k[b]
        for i in range(n):
            position = end - n + i
            low = 0 if window is None else max(0, position - window + 1)
            at = np.arange(low, position + 1)
            slots = tables[b][at // S] * S + at % S
            out[cu_q[b] + i] = softmax_attention(q[cu_q[b] + i], cache[0][slots], cache[1][slots])
    return out


def flash_attn(step, g):
    a, group = step.batch.to_flash_attn(g), GROUPS[g]
    lens = np.diff(a.cu_seqlens_k)
    assert (a.max_seqlen_q, a.max_seqlen_k) == (np.diff(a.cu_seqlens_q).max(), lens.max())
    for b, length in enumerate(lens):
        used = -(-length // group.block_size)
        assert (a.block_table[b, used:] == -1).all()
    return paged_varlen(
        step.q, step.caches[g], a.cu_seqlens_q, lens, a.block_table, group.block_size, group.sliding_window
    )


def flashinfer(step, g):
    a, group = step.batch.to_flashinfer(g), GROUPS[g]
    S = group.block_size
    tables = [a.kv_indices[a.kv_indptr[b] : a.kv_indptr[b + 1]] for b in range(len(a.kv_indptr) - 1)]
    assert ((a.kv_last_page_len >= 1) & (a.kv_last_page_len <= S)).all()
    lens = (np.diff(a.kv_indptr) - 1) * S + a.kv_last_page_len
    return paged_varlen(step.q, step.caches[g], a.qo_indptr, lens, tables, S, group.sliding_window)


def page_size_one(step, g):
    a, window = token_tables(step.batch, g), GROUPS[g].sliding_window
    k, v = (
        np.full_like(c, np.nan) for c in step.caches[g]
    )  # what the step writes is written by this adapter's own loc
    for cache, old, new in zip((k, v), step.caches[g], step.fresh[g], strict=True):
        cache[:] = old
        cache[a.out_cache_loc] = new
    tables = [row[:length] for row, length in zip(a.req_to_token, a.seq_lens, strict=True)]
    cu = np.append(a.extend_start_loc, a.extend_start_loc[-1] + a.extend_seq_lens[-1])
    assert (a.extend_prefix_lens + a.extend_seq_lens == a.seq_lens).all()
    return paged_varlen(step.q, (k, v), cu, a.seq_lens, tables, 1, window)


def dense(step, g):
    a, batch = dense_inputs(step.batch, g), step.batch
    B, Q, N = a.mask.shape
    assert (batch.max_query_len, batch.max_seq_len) == (Q, N)
    out = np.full((B, Q, HEAD), np.nan)
    for b in range(B):
        for i in range(Q):
            seen = a.key_slots[b][a.mask[b, i]]
            if len(seen):
                assert a.positions[b, i] == batch.positions[a.token_indices[b, i]]
                q = step.q[a.token_indices[b, i]]
                out[b, i] = softmax_attention(q, step.caches[g][0][seen], step.caches[g][1][seen])
    b = batch.req_indices
    return out[b, np.arange(batch.num_tokens) - batch.query_start_loc[b]]


def nano_vllm(step, g):
    a, group = nano_vllm_context(step.batch, g), GROUPS[g]
    S, window = group.block_size, group.sliding_window
    assert a.slot_mapping.dtype == np.int32
    assert np.array_equal(a.slot_mapping, step.batch.slot_mapping[g][: step.batch.num_tokens])
    if a.is_prefill:
        assert (a.max_seqlen_q, a.max_seqlen_k) == (np.diff(a.cu_seqlens_q).max(), np.diff(a.cu_seqlens_k).max())
        assert a.context_lens is None
    else:
        assert a.cu_seqlens_q is a.cu_seqlens_k is None
        cu = np.arange(len(a.context_lens) + 1)
        return paged_varlen(step.q, step.caches[g], cu, a.context_lens, a.block_tables, S, window)
    if a.block_tables is None:  # nothing cached: the keys are the step's own, laid out like the queries
        assert np.array_equal(a.cu_seqlens_q, a.cu_seqlens_k)
        tables = [np.arange(lo, hi) for lo, hi in zip(a.cu_seqlens_k[:-1], a.cu_seqlens_k[1:], strict=True)]
        return paged_varlen(step.q, step.fresh[g], a.cu_seqlens_q, np.diff(a.cu_seqlens_k), tables, 1, window)
    return paged_varlen(step.q, step.caches[g], a.cu_seqlens_q, np.diff(a.cu_seqlens_k), a.block_tables, S, window)


def by_common_attention_metadata(step, g):
    padded = common_attention_metadata(step.batch, g)
    a, group = padded.unpadded(), GROUPS[g]
    assert (padded.slot_mapping[padded.num_actual_tokens :] == -1).all()
    assert (np.diff(padded.query_start_loc) >= 0).all()
    assert not padded.seq_lens[padded.num_reqs :].any()
    S = group.kernel_block_size or group.block_size
    assert (padded.block_table_tensor[padded.num_reqs :] < group.block_size // S).all()  # the null block
    assert np.array_equal(a.seq_lens - a.num_computed_tokens_cpu, np.diff(a.query_start_loc))
    assert np.array_equal(a.token_to_req_indices(), step.batch.req_indices)
    cache = tuple(np.full_like(c, np.nan) for c in step.caches[g])
    for fresh, old, new in zip(step.fresh[g], step.caches[g], cache, strict=True):
        new[:] = old
        new[a.slot_mapping] = fresh
    return paged_varlen(step.q, cache, a.query_start_loc, a.seq_lens, a.block_table_tensor, S, group.sliding_window)


def masked(step, g):
    """The batch's own dense mask with gathered keys: what kernels that take a mask read."""
    batch, tables = step.batch, token_tables(step.batch, g)
    mask = batch.attention_mask(g)
    out = np.empty_like(step.q)
    for t in range(batch.num_tokens):
        b = batch.req_indices[t]
        match batch.attention_state.name:
            case "DECODE_ONLY":
                seen = np.ones(batch.seq_lens[b], bool)
                if (window := GROUPS[g].sliding_window) is not None:
                    seen[: max(0, len(seen) - window)] = False  # a decode kernel takes the window as a number
            case "PREFILL_NO_CACHE":
                seen = mask[t - batch.query_start_loc[b]][: batch.seq_lens[b]]
            case _:
                seen = mask[t]
        slots = tables.req_to_token[b, : len(seen)][seen]
        out[t] = softmax_attention(step.q[t], step.caches[g][0][slots], step.caches[g][1][slots])
    return out


def chosen(step, g):
    """An indexer that chooses all keys in its ranges, in any order, and attention to what is in their slots."""
    batch, a = step.batch, indexer_inputs(step.batch, g)
    begin, end = a.key_ranges.T
    choice, rng = np.full((batch.num_tokens, int((end - begin).max()) + 2), -1), np.random.default_rng(0)
    for t, b in enumerate(batch.req_indices):
        assert a.cu_seqlens_k[b] <= begin[t] < end[t] <= a.cu_seqlens_k[b + 1]
        at = rng.permutation(choice.shape[1])[: end[t] - begin[t]]
        choice[t, at] = np.arange(begin[t], end[t]) - a.cu_seqlens_k[b]
    slots = chosen_slots(batch, choice, g)
    assert np.array_equal(chosen_slots(batch, choice, g, np.zeros_like(slots)), slots)
    assert np.array_equal(slots < 0, choice < 0)
    return np.array([
        softmax_attention(q, *(cache[own[own >= 0]] for cache in step.caches[g]))
        for q, own in zip(step.q, slots, strict=True)
    ])  # fmt: skip


KERNELS = [flash_attn, flashinfer, page_size_one, dense, nano_vllm, by_common_attention_metadata, masked, chosen]


@pytest.mark.one_in(13)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    "kinds",
    [("prefill", "chunk", "resume", "decode", "verify"), ("prefill",), ("decode",), ("verify",), ("chunk",)],
    ids="+".join,
)
def test_attention_from_the_adapters_arguments_is_plain_attention(kernel, kinds):
    for seed in range(12):
        step = random_step(seed, kinds, pad=seed % 3 == 0)
        for g in range(len(GROUPS)):
            assert np.allclose(kernel(step, g), step.plain[g], rtol=1e-9), (seed, g)


@pytest.mark.parametrize(("value", "expected"), [(1, "at a position that its token sees"), (-2, "−1 … 0")])
def test_a_chosen_key_that_its_token_does_not_see_is_refused(value, expected):
    batch = random_step(3, ("prefill",)).batch
    choice = np.zeros((batch.num_tokens, 2), np.int32)
    choice[0, 1] = value
    with pytest.raises(PlanError, match=expected):
        chosen_slots(batch, choice)
    with pytest.raises(PlanError, match="a row for each token"):
        chosen_slots(batch, choice[1:])


# -- chunked-local attention --------------------------------------------------


def test_chunked_local_pieces_are_plain_attention_inside_their_chunk():
    for seed in range(40):
        step = random_step(seed)
        for g in (0, 1):
            group = GROUPS[g]
            a = chunked_local(step.batch, 16, g)
            got = paged_varlen(
                step.q, step.caches[g], a.cu_seqlens_q, a.seqlens_k, a.block_table, group.block_size, None
            )
            assert np.allclose(got, step.chunked[g], rtol=1e-9)
            assert a.block_table.shape[1] == 16 // group.block_size
            assert a.max_seqlen_q == np.diff(a.cu_seqlens_q).max() <= 16
            assert a.max_seqlen_k == a.seqlens_k.max() <= 16
            batch = step.batch
            assert np.array_equal(a.req_indices, batch.req_indices[a.cu_seqlens_q[:-1]])
            assert len(a.seqlens_k) <= 2 * batch.num_reqs + batch.num_tokens // 16
            with pytest.raises(ConfigError, match="multiple of the group's block_size"):
                chunked_local(batch, 3, g)
