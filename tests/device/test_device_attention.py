"""Keys written and read by the kernels against the NumPy executor's functions."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import ON_GPU, WHERE, Device, host, to_device

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.device import attention as attention_module
from foreword.device.attention import DeviceAttention, LayerCache, num_splits_for
from foreword.device.rows import DeviceRows
from foreword.executors.functions import cap, rms_norm, softmax
from foreword.executors.numpy import rotate
from foreword.models.spec import RopeSpec

BLOCK, BLOCKS = 8, 40
LENGTHS = ((1, 33), (7, 0), (1, 5), (20, 12))  # scheduled, computed of each request


class Step:
    """A padded batch with decodes, a prompt and a chunk, whose order differs from that of their rows."""

    def __init__(self, lengths=LENGTHS, order=(2, 0, 3, 1), padded=(32, 5)) -> None:
        rng = np.random.default_rng(0)
        self.states = RequestStates(max_num_reqs=6, max_model_len=64, vocab_size=99, kv_groups=[KVGroup(BLOCK)])
        numbers = rng.permutation(np.arange(1, BLOCKS)).tolist()
        for i, (n, c) in enumerate(lengths):
            held = [numbers.pop() for _ in range(-(-(n + c) // BLOCK))]
            self.states.add_request(NewRequest(str(i), rng.integers(0, 99, n + c), [held], num_computed_tokens=c))
        self.rows = DeviceRows(self.states, Device(), max_num_batched_tokens=40)
        buffers = InputBuffers.for_states(self.states, 40)
        plan = {str(i): lengths[i][0] for i in order}
        self.batch = prepare_inputs(self.states, plan, buffers, pad_to=padded)
        self.rows.send(buffers)
        self.rows.prepare(*padded)


def cache_of(kv_heads: int, dim: int, value_dim: int):
    """Keys and values of one layer in blocks that hold both, and some more."""
    sizes = [BLOCK * kv_heads * dim, BLOCK * kv_heads * value_dim, 3]
    keys, values, _ = torch.zeros(BLOCKS, sum(sizes), device=WHERE).split(sizes, 1)
    return keys.unflatten(1, (BLOCK, kv_heads, dim)), values.unflatten(1, (BLOCK, kv_heads, value_dim))


def reference(step: Step, q, keys, values, *, scale, window=None, chunked=False, softcap=0.0, sinks=None):
    """Attention from the paged keys as they are, request by request."""
    batch, out = step.batch, np.zeros((*q.shape[:2], values.shape[-1]), np.float32)
    shared = q.shape[1] // keys.shape[1]
    for b in range(batch.num_reqs):
        at, length = slice(*batch.query_start_loc[b : b + 2].tolist()), int(batch.seq_lens[b])
        blocks = batch.block_table[0][b]
        slots = blocks[np.arange(length) // BLOCK] * BLOCK + np.arange(length) % BLOCK
        k, v = (np.repeat(x[slots], shared, 1) for x in (keys, values))
        scores = cap(np.einsum("thd,shd->hts", q[at], k) * np.float32(scale), softcap or None)
        distance = batch.positions[at][:, None] - np.arange(length)
        seen = (distance >= 0) & (distance < (window or 1 << 30))
        if chunked:
            seen = (distance >= 0) & (np.arange(length) // window == batch.positions[at][:, None] // window)
        scores = np.where(seen, scores, np.float32(-np.inf))
        if sinks is not None:
            sink = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink], -1)
        out[at] = np.einsum("hts,shd->thd", softmax(scores)[..., :length], v)
    return out


def slots_below(step: Step, window: int) -> list[int]:
    """The slots of the keys that no query of the step sees."""
    blocks, computed = step.batch.block_table[0], step.batch.num_computed_tokens
    below = [(b, p) for b, c in enumerate(computed.tolist()) for p in range(c - window + 1)]
    return [int(blocks[b, p // BLOCK]) * BLOCK + p % BLOCK for b, p in below]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "options"),
    [
        (9, 3, 64, 64, {}),
        (4, 4, 16, 16, {"window": 9}),
        (8, 2, 24, 24, {"softcap": 5.0, "splits": 3}),
        (6, 2, 32, 16, {"sinks": True, "splits": 4}),
        (4, 2, 16, 16, {"window": 6, "sinks": True, "softcap": 3.0, "splits": 2}),
        (35, 1, 16, 16, {"splits": 2}),  # the heads of a key are of several programs
        (18, 1, 16, 16, {"window": 9, "sinks": True}),
        (4, 2, 16, 16, {"window": 9, "chunked": True}),
        (18, 1, 16, 16, {"window": 7, "chunked": True, "splits": 3}),
    ],
)
def test_attention_over_the_rows_equals_attention_by_definition(heads, kv_heads, dim, value_dim, options):
    step, rng = Step(), np.random.default_rng(1)
    q, keys, values, sinks = (
        rng.standard_normal(shape, np.float32)
        for shape in (
            (32, heads, dim),
            (BLOCKS * BLOCK, kv_heads, dim),
            (BLOCKS * BLOCK, kv_heads, value_dim),
            (heads,),
        )
    )
    chunked = options.get("chunked", False)
    splits, window, softcap = options.get("splits", 1), options.get("window"), options.get("softcap", 0.0)
    sinks = sinks if "sinks" in options else None
    attention = DeviceAttention(
        step.rows, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, num_splits=splits
    )
    cache = cache_of(kv_heads, dim, value_dim)
    for blocks, numbers in zip(cache, (keys, values), strict=True):
        blocks.copy_(to_device(numbers).view(blocks.shape))
        if window is not None:  # what other requests left in blocks that were freed below the window
            blocks.flatten(0, 1)[slots_below(step, window)] = float("nan")
    out = torch.full((32, heads, value_dim), float("nan"), device=WHERE)
    attention.attend(
        to_device(q), LayerCache(*cache), out, num_tokens=32, num_reqs=5, scale=dim**-0.5, window=window,
        chunked=chunked, softcap=softcap, sinks=None if sinks is None else to_device(sinks),
    )  # fmt: skip
    expected = reference(
        step, q, keys, values, scale=dim**-0.5, window=window, chunked=chunked, softcap=softcap, sinks=sinks
    )
    got = host(out)[: step.batch.num_tokens]
    np.testing.assert_allclose(got, expected[: step.batch.num_tokens], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("dim", "value_dim", "pairs", "norm"), [(16, 16, 8, True), (24, 16, 6, False), (16, 16, 0, True)]
)
def test_queries_and_keys_are_normed_rotated_and_written(dim, value_dim, pairs, norm):
    step, rng, heads, kv_heads = Step(), np.random.default_rng(2), 6, 2
    T = step.batch.num_tokens
    qkv = rng.standard_normal((32, heads * dim + kv_heads * (dim + value_dim)), np.float32)
    q_norm, k_norm = rng.standard_normal((2, dim), np.float32)
    rope = RopeSpec(tuple(1.0 / 10.0 ** (np.arange(pairs) / max(pairs, 1))), scale=1.5)
    angle = np.arange(64, dtype=np.float32)[:, None] * np.asarray(rope.inv_freq, np.float32)
    cos, sin = (to_device(np.float32(rope.scale) * f(angle)) for f in (np.cos, np.sin))
    cache = cache_of(kv_heads, dim, value_dim)
    queries = torch.zeros(32, heads, dim, device=WHERE)
    attention = DeviceAttention(step.rows, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    attention.write(
        to_device(qkv), queries, LayerCache(*cache), num_tokens=32, rope=(cos, sin) if pairs else None,
        norms=(to_device(q_norm), to_device(k_norm)) if norm else None, eps=1e-5,
    )  # fmt: skip
    q, k, v = np.split(qkv[:T], [heads * dim, (heads + kv_heads) * dim], 1)
    q, k, v = q.reshape(T, heads, dim), k.reshape(T, kv_heads, dim), v.reshape(T, kv_heads, value_dim)
    if norm:
        q, k = rms_norm(q, 1e-5) * q_norm, rms_norm(k, 1e-5) * k_norm
    if pairs:
        at = step.batch.positions[:T, None]
        q, k = rotate(q, at, rope), rotate(k, at, rope)
    slots = step.batch.slot_mapping[0][:T]
    keys, values = (host(blocks.flatten(0, 1)) for blocks in cache)
    np.testing.assert_allclose(host(queries[:T]), q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(keys[slots], k, rtol=1e-5, atol=1e-6)
    assert np.array_equal(values[slots], v)
    others = np.setdiff1d(np.arange(BLOCKS * BLOCK), slots)
    assert not keys[others].any()
    assert not values[others].any()
    assert not queries[T:].any()


@pytest.mark.parametrize(
    ("programs", "num_keys", "multiprocessors", "splits"),
    [
        (8, 131_072, 132, 64),  # one request of a large model on an H100
        (80, 131_072, 132, 4),
        (8, 600, 132, 2),  # few keys
        (512, 131_072, 132, 1),  # many requests
        (1, 10**7, 132, 64),
        (8, 100, 1, 1),
    ],
)
def test_programs_share_keys_until_all_multiprocessors_have_work(programs, num_keys, multiprocessors, splits):
    assert num_splits_for(programs, num_keys, multiprocessors) == splits


def test_splits_are_chosen_by_the_length_and_the_device(monkeypatch):
    """A step alone on a large device: memory of the splits holds every step, and the numbers are those without."""
    monkeypatch.setattr(attention_module, "_LEAST_KEYS", 4)
    step, rng = Step(), np.random.default_rng(5)
    monkeypatch.setattr(step.rows.api, "multiprocessors", 10)
    q = to_device(rng.standard_normal((32, 4, 16), np.float32))
    keys, values = to_device(rng.standard_normal((2, BLOCKS, BLOCK, 2, 16), np.float32))
    found, grids = [], []
    monkeypatch.setattr(
        step.rows.api, "launch", lambda name, grid, *a, **k: grids.append((name, grid)) or launch(name, grid, *a, **k)
    )
    launch = Device.launch.__get__(step.rows.api)
    for splits in (None, 1):
        out = torch.zeros(32, 4, 16, device=WHERE)
        attention = DeviceAttention(step.rows, heads=4, kv_heads=2, dim=16, num_splits=splits)
        attention.attend(q, LayerCache(keys, values), out, num_tokens=32, num_reqs=5, scale=0.25)
        found.append(out)
    assert [grid for name, grid in grids if name == "attend"] == [(9, 2, 2), (9, 2, 1)]
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (12, 2), (71, 1)])
def test_the_memory_of_splits_holds_the_parts_of_every_step(monkeypatch, heads, kv_heads, tokens):
    monkeypatch.setattr(attention_module, "_LEAST_KEYS", 1)
    step, grids = Step(), []
    monkeypatch.setattr(step.rows.api, "multiprocessors", 30)
    monkeypatch.setattr(step.rows.api, "launch", lambda name, grid, *a, **k: grids.append(grid))
    attention = DeviceAttention(step.rows, heads=heads, kv_heads=kv_heads, dim=16)
    for reqs in range(1, min(tokens, 6) + 1):
        none = torch.zeros(1, 1, 1, 1, device=WHERE)
        attention.attend(none, LayerCache(none, none), none, num_tokens=tokens, num_reqs=reqs, scale=1.0)
        splits = grids[0][2]
        assert splits == 1 or splits * tokens * heads * 18 <= len(attention.partial)
        del grids[:]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 64), (20, 1, 128)])
def test_steps_of_prompts_have_tiles_of_their_own(heads, kv_heads, dim, splits, window):
    """Two requests of 18 and 20 tokens: tiles with queries of several tokens, and some without a query."""
    step, rng = Step(((18, 33), (20, 0)), (1, 0), (40, 2)), np.random.default_rng(4)
    shapes = (40, heads, dim), *[(BLOCKS * BLOCK, kv_heads, dim)] * 2
    q, keys, values = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    attention = DeviceAttention(step.rows, heads=heads, kv_heads=kv_heads, dim=dim, num_splits=splits, dot="float16")
    cache = LayerCache(*(to_device(x).view(BLOCKS, BLOCK, kv_heads, dim) for x in (keys, values)))
    out, grids, launch = torch.zeros(40, heads, dim, device=WHERE), [], step.rows.api.launch
    step.rows.api.launch = lambda name, grid, *a, **k: grids.append(k.get("BLOCK_M")) or launch(name, grid, *a, **k)
    attention.attend(to_device(q), cache, out, num_tokens=40, num_reqs=2, scale=dim**-0.5, window=window)
    assert grids[0] == 128
    expected = reference(step, *(x.astype(np.float32) for x in (q, keys, values)), scale=dim**-0.5, window=window)
    np.testing.assert_allclose(host(out)[:38], expected[:38], rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize("magnitude", [1.0, 1e-3])
def test_products_in_float16_keep_the_scales_of_8_bit_values(magnitude):
    """A scale of small values times a weight is below what float16 holds."""
    step, rng, heads, kv_heads, dim = Step(), np.random.default_rng(4), 4, 2, 16
    codes = torch.zeros(2, BLOCKS, BLOCK, kv_heads, dim, dtype=torch.uint8, device=WHERE)
    scales = torch.zeros(2, BLOCKS, BLOCK, 2, device=WHERE)
    numbers = rng.standard_normal((2, BLOCKS, BLOCK, kv_heads, dim), np.float32)
    numbers[1] *= magnitude
    scales.copy_(to_device(np.abs(numbers).max(-1) / 448))
    codes.copy_((to_device(numbers) / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8))
    keys, values = host((codes.view(torch.float8_e4m3fn).float() * scales[..., None]).flatten(1, 2))
    q = rng.standard_normal((32, heads, dim), np.float32).astype(np.float16)
    out = torch.zeros(32, heads, dim, device=WHERE)
    attention = DeviceAttention(step.rows, heads=heads, kv_heads=kv_heads, dim=dim, dot="float16")
    cache = LayerCache(codes[0], codes[1], (scales[0], scales[1]))
    attention.attend(to_device(q), cache, out, num_tokens=32, num_reqs=5, scale=0.25)
    expected = reference(step, q.astype(np.float32), keys, values, scale=0.25)
    T = step.batch.num_tokens
    error = np.abs(host(out)[:T] - expected[:T]).max() / np.abs(expected[:T]).max()
    assert error < (1e-3 if ON_GPU else 2e-5)  # the operands of tensor cores are rounded to 11 bits
