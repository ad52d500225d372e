"""Paged attention in torch against dense attention in float64 over each request's whole history."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.executors.torch import attention
from foreword.executors.torch.attention import AttentionCall, GatheredAttention
from foreword.executors.torch.cache import KVLayer, PagedCache

BLOCK, LENGTHS = 4, {"a": 37, "b": 5, "c": 64, "d": 20}
PLANS = [
    {"a": 7, "b": 5},
    {"c": 40, "a": 1, "d": 9},
    {"a": 1, "c": 1, "d": 1},
    {"a": 20, "c": 23, "d": 1},
    {"a": 8, "d": 8},
]
"""Prompts in chunks, decode steps and mixes. Lengths are those of prompts, so that nothing is sampled."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expected(q, k, v, scale, window, chunk, softcap, sinks):
    """The last queries of one request: q [N, H, D], k and v of all tokens so far."""
    per_key, first = q.shape[1] // k.shape[1], len(k) - len(q)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for i, head in np.ndindex(*q.shape[:2]):
        at = first + i
        seen = [
            j for j in range(at + 1) if not (window and j <= at - window) and not (chunk and j // chunk != at // chunk)
        ]
        scores = k[seen, head // per_key] @ q[i, head] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        total = np.exp(scores).sum() + (np.exp(sinks[head]) if sinks is not None else 0)
        out[i, head] = np.exp(scores) @ v[seen, head // per_key] / total
    return out


MASKS = {
    "full": {},
    "window": {"window": 6},
    "chunk": {"chunk": 10},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "window, softcap and sinks": {"window": 9, "softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("heads", [(4, 2, 8, 8), (3, 3, 16, 8), (4, 1, 8, 16)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries_at_once", "keys_at_once"), [(128, 16384), (8, 48)])
def test_steps_equal_dense_attention(monkeypatch, heads, mask, queries_at_once, keys_at_once):
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", queries_at_once)
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", keys_at_once)
    run_steps(heads, dict(MASKS[mask]), torch.float32, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("mask", MASKS)
def test_half_precision(mask, dtype, tolerance):
    run_steps((4, 2, 8, 8), dict(MASKS[mask]), dtype, tolerance)


def run_steps(heads, mask, dtype, tolerance, make=GatheredAttention, device="cpu"):
    num_heads, num_kv_heads, key_dim, value_dim = heads
    rng = np.random.default_rng(0)
    states = RequestStates(max_num_reqs=8, max_model_len=128, vocab_size=10, kv_groups=[KVGroup(BLOCK)] * 2)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=128)
    layers = [KVLayer(0, 0, num_kv_heads, key_dim, value_dim), KVLayer(1, 0, num_kv_heads, 2 * key_dim, value_dim)]
    cache = PagedCache(layers, num_blocks=128, block_size=BLOCK, dtype=dtype, device=device)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys[1:], values[1:] = torch.nan, torch.inf  # what requests before left
    paged = make(cache)
    sinks = rng.standard_normal(num_heads) if mask.pop("sinks", False) else None
    arguments = {"window": None, "chunk": None, "softcap": None} | mask
    free = list(rng.permutation(np.arange(1, 128)))
    history = [{name: ([], []) for name in LENGTHS} for _ in layers]
    for plan in PLANS:
        for name in plan:
            if name not in states:
                blocks = [[int(free.pop()) for _ in range(-(-LENGTHS[name] // BLOCK))] for _ in range(2)]
                states.add_request(NewRequest(name, prompt_token_ids=[1] * LENGTHS[name], block_ids=blocks))
        batch = prepare_inputs(states, plan, buffers, check="full")
        paged.begin(batch)
        for i, layer in enumerate(layers):
            scale = layer.key_dim**-0.5
            shapes = (num_heads, layer.key_dim), (num_kv_heads, layer.key_dim), (num_kv_heads, value_dim)
            q, k, v = (
                torch.tensor(rng.standard_normal((batch.num_tokens, *s)), dtype=dtype, device=device) for s in shapes
            )
            paged.write(i, k, v)
            given = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=device)
            out = paged.attend(AttentionCall(i, scale, **arguments, sinks=given), q)
            assert out.dtype == dtype
            for b, name in enumerate(batch.req_ids):
                start, end = batch.query_start_loc[b : b + 2]
                for past, new in zip(history[i][name], (k, v), strict=True):
                    past.append(new[start:end].double().cpu().numpy())
                past_k, past_v = (np.concatenate(past) for past in history[i][name])
                exact = expected(q[start:end].double().cpu().numpy(), past_k, past_v, scale, **arguments, sinks=sinks)
                np.testing.assert_allclose(out[start:end].double().cpu().numpy(), exact, atol=tolerance, rtol=tolerance)
        states.commit(batch, {})


def test_blocks_are_copied_and_zeroed_in_every_layer():
    layers = [KVLayer(0, 0, 2, 4, 2), KVLayer(0, 1, 1, 8, 8), KVLayer(1, 0, 1, 2, 2)]
    cache = PagedCache(layers, num_blocks=6, block_size=BLOCK, dtype=torch.float32)
    everything = [*cache.keys[:2], *cache.values[:2]]  # layer 2 has its place in the slot of layer 0
    for tensor in everything:
        tensor.copy_(torch.rand(tensor.shape))
    before = [tensor.clone() for tensor in everything]
    cache.copy_blocks(np.array([1, 2], np.int32), np.array([2, 3], np.int32))
    cache.zero_blocks(np.array([5], np.int32))
    for tensor, old in zip(everything, before, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 3, 4]], old[[0, 1, 1, 2, 4]])
        assert not tensor[5].any()


def test_slots_of_layers_of_several_groups_share_their_memory():
    layers = [KVLayer(0, 0, 2, 4, 4), KVLayer(1, 0, 1, 4, 4), KVLayer(1, 1, 1, 4, 4)]
    cache = PagedCache(layers, num_blocks=3, block_size=BLOCK, dtype=torch.float32)
    assert cache.keys[0].untyped_storage().data_ptr() == cache.values[1].untyped_storage().data_ptr()
    assert cache.keys[2].untyped_storage().nbytes() == 3 * BLOCK * 8 * 4
