"""The torch executor of decoders against a plain forward pass in float64, and in engines."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from hypothesis import given
from hypothesis import strategies as st

from foreword.batch import BlockOps
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, PlanError
from foreword.executors.kinds import KINDS
from foreword.executors.options import TorchOptions
from foreword.executors.torch import weights as weights_module
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.weights import Loader
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import LayerSpec, MoeSpec
from kernels.kernel_adapters import merged, random_adapter
from kernels.kernel_driver import Driver
from kernels.kernel_reference import (
    SPECS,
    Reference,
    float_tensor,
    of_steps,
    random_weights,
    relative_error,
    rope,
    tiny_spec,
)
from kernels.kernel_traffic import BLOCK_SIZE, assert_traffic_changes_nothing, engine

WEIGHTS = {name: random_weights(spec) for name, spec in SPECS.items()}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ERRORS = {"fp32": 2e-5, "fp16": 0.02, "bf16": 0.12}


def make(spec, weights, *, num_blocks=400, block_size=BLOCK_SIZE, **options):
    options = {"dtype": "fp32", "num_threads": 1, **options}
    return TorchExecutor(spec, weights, num_blocks=num_blocks, block_size=block_size, **options)


def driver(spec, weights, **options):
    return Driver(spec, weights, max_num_reqs=12, executor=make(spec, weights, **options))


def tokens_of(spec, count, seed=3):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SPECS)
def test_chunks_and_decode_steps_give_the_logits_of_the_whole_sequence(name, dtype, device):
    spec, weights = SPECS[name], WEIGHTS[name]
    tokens = tokens_of(spec, 90)
    want = Reference(spec, weights).logits(tokens)
    got = driver(spec, weights, dtype=dtype, device=device).run_alone("a", tokens, [50, 1, 1, 7, 31])
    for logits, position in zip(got, (49, 50, 51, 58, 89), strict=True):
        assert relative_error(logits, want[position]) < of_steps(spec, ERRORS[dtype])


RECURRENT = st.builds(
    lambda kind, key_heads, per_key, sizes, kernel, bias: RecurrentSpec(
        kind,
        *(1, 1) if kind in ("mamba1", "rg_lru") else (key_heads * per_key, key_heads),
        *(1 if kind == "rg_lru" else sizes[0], sizes[1]),
        kernel,
        bias and kind != "gated_delta",
        rank=4 if kind == "rg_lru" else 3,
        inner_eps=1e-3 if key_heads > 1 else None,
        channel_decays=bias and kind == "gated_delta",
    ),
    st.sampled_from(["mamba2", "gated_delta", "mamba1", "rg_lru"]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.tuples(st.sampled_from([4, 8, 12]), st.sampled_from([4, 8, 20])),
    st.integers(1, 4),
    st.booleans(),
)
MOE = st.builds(
    lambda experts, chosen, size, norm, shared: MoeSpec(experts, min(chosen, experts), size, norm, shared),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([8, 20]),
    st.booleans(),
    st.sampled_from([0, 16]),
)


@st.composite
def specs(draw):
    """Decoders of odd sizes with any features together."""
    head_dim = draw(st.sampled_from([8, 12, 16]))
    ropes = st.sampled_from([None, rope(head_dim), rope(head_dim // 2, 100.0, 1.2)])
    attention = st.builds(LayerSpec, ropes, st.sampled_from([None, 5]), st.none() | MOE)
    recurrent = st.builds(LayerSpec, st.none(), st.none(), st.none() | MOE, RECURRENT)
    kv_heads = draw(st.integers(1, 3))
    return tiny_spec(
        vocab_size=draw(st.sampled_from([33, 64])),
        hidden_size=draw(st.sampled_from([20, 32, 44])),
        intermediate_size=draw(st.sampled_from([24, 36])),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=64,
        layers=tuple(draw(st.lists(attention | recurrent, min_size=1, max_size=3))),
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        embedding_scale=draw(st.sampled_from([1.0, 3.5])),
        attn_softcap=draw(st.sampled_from([None, 3.0])),
        final_softcap=draw(st.sampled_from([None, 5.0])),
        num_positions=draw(st.sampled_from([0, 64])),
        **draw(st.sampled_from([{}, {"parallel_mlp": True}, {"parallel_mlp": True, "parallel_norm": True}])),
        **{
            name: draw(st.booleans())
            for name in (
                *("tie_embeddings", "qkv_bias", "qk_norm", "attn_gate", "head_gates", "post_norms"),
                *("embed_norm", "logits_bias", "o_bias", "layer_norm"),
            )
        },
    )


@given(specs(), st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 8]))
def test_any_decoder_in_any_steps_gives_the_logits_of_the_whole_sequences(spec, seed, block_size):
    weights, rng = random_weights(spec, seed), np.random.default_rng(seed)
    run = Driver(spec, weights, block_size=block_size, num_blocks=800, executor=make(
        spec, weights, num_blocks=800, block_size=block_size
    ))  # fmt: skip
    texts = {name: tokens_of(spec, int(rng.integers(1, 30)), seed) for name in "abc"}
    wants = {name: Reference(spec, weights).logits(tokens) for name, tokens in texts.items()}
    for name, tokens in texts.items():
        run.add(name, tokens)
    left = {name: len(tokens) for name, tokens in texts.items()}
    while left:
        names = rng.permutation([*left])[: rng.integers(1, len(left) + 1)]
        plan = {str(name): int(rng.integers(1, left[name] + 1)) for name in names}
        for name, logits in run.step(plan).items():
            left[name] -= plan[name]
            assert relative_error(logits, wants[name][len(texts[name]) - left[name] - 1]) < 1e-4
        left = {name: count for name, count in left.items() if count}


@pytest.mark.parametrize(
    ("name", "num_blocks", "drafts"),
    [("llama", 90, True), ("llama", 16, False), ("gemma", 40, True), ("moe", 90, True), ("mamba2", 90, False),
     ("gated_delta", 60, False)],
)  # fmt: skip
def test_tokens_do_not_depend_on_traffic_drafts_overlap_or_preemption(name, num_blocks, drafts):
    spec, weights = SPECS[name], WEIGHTS[name]
    crowd = engine(
        make(spec, weights, num_blocks=num_blocks), spec, num_blocks=num_blocks,
        max_num_seqs=5, max_num_batched_tokens=48, async_scheduling=True, watermark=0.0,
        speculation=SpeculationConfig(num_tokens=3, min_match=1, adaptive=False) if drafts else None,
    )  # fmt: skip
    alone = engine(make(spec, weights, num_blocks=90), spec, num_blocks=90, prefix_caching=False)
    assert_traffic_changes_nothing(crowd, alone, spec.vocab_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, "fp32")
        for name in ("llama", "odd_sizes", "qkv_bias", "gemma", "moe", "gated_delta", "mamba1", "short_conv")
    ]
    + [(name, "fp32") for name in ("scaled_state_biases", "latent", "latent_experts", "own_inputs")]
    + [(name, "fp32") for name in ("aside", "chunks", "late_experts", "biased_experts", "dense_head")]
    + [(name, dtype) for name in ("llama", "odd_sizes") for dtype in ("bf16", "fp16")],
)
def test_adapters_give_the_logits_of_merged_weights_in_a_crowd(name, dtype, device):
    """The adapters have different ranks and matrices, and are loaded in any order; some requests have none."""
    spec, weights = SPECS[name], WEIGHTS[name]
    adapters = {
        7: random_adapter(spec, 8, 0),
        3: random_adapter(spec, 17, 1, ("q", "down")),
        9: random_adapter(spec, 1, 2, ("k", "v", "gate", "o")),
        4: random_adapter(spec, 5, 3),
    }
    run = driver(spec, weights, dtype=dtype, device=device)
    sizes = {number: run.executor.load_lora(number, adapter) for number, adapter in adapters.items()}
    assert sizes[7] > sizes[9] > 0
    run.executor.drop_lora(4)
    run.executor.drop_lora(4)
    work = {str(i): (tokens_of(spec, 40, i), (0, 7, 3, 9)[i % 4]) for i in range(8)}
    for request, (tokens, number) in work.items():
        run.add(request, tokens, number)
    run.step({request: 3 + 4 * int(request) for request in work})
    run.step(dict.fromkeys(work, 1))
    got = run.step({request: 36 - 4 * int(request) for request in reversed(work)})
    for request, (tokens, number) in work.items():
        own = merged(weights, adapters[number]) if number else weights
        assert relative_error(got[request], Reference(spec, own).logits(tokens)[-1]) < ERRORS[dtype]
    run.add("dropped", [1, 2, 3], 4)
    with pytest.raises(PlanError, match=r"no adapter has this number.*4"):
        run.step({"dropped": 3})


def test_copied_and_zeroed_blocks_are_those_of_the_original():
    spec, weights = SPECS["mamba2"], WEIGHTS["mamba2"]
    tokens = tokens_of(spec, 33)
    run = driver(spec, weights, dtype="bf16")
    *_, want = run.run_alone("a", tokens, [32, 1])
    again = driver(spec, weights, dtype="bf16")
    again.run_alone("a", tokens, [32])
    again.add("b", tokens)
    a, b = again.states.row_of("a"), again.states.row_of("b")
    tables = [table.table for table in again.states.block_tables]
    pairs = [(int(t[a, k]), int(t[b, k])) for t in tables for k in range(min(2, t.shape[1]))]
    again.executor.apply_block_ops(BlockOps.of(copies=pairs))
    again.executor.apply_block_ops(BlockOps.of(zero=[source for source, _ in pairs]))
    again.states.num_computed_tokens[b] = 32
    np.testing.assert_array_equal(again.step({"b": 1})["b"], want)


def test_the_head_of_latent_attention_is_stored_once_as_the_pool_is_planned():
    name, spec = next((name, spec) for name, spec in SPECS.items() if spec.mla is not None and not spec.num_state_slots)
    options = TorchOptions(dtype="fp32")
    planned = KINDS["torch"].bytes_per_value(spec, WEIGHTS[name], options) * BLOCK_SIZE * spec.token_size
    executor = make(spec, WEIGHTS[name])
    assert executor.block_bytes == planned * spec.num_slots == 4 * BLOCK_SIZE * spec.head_dim * spec.num_slots


def test_a_block_that_held_a_state_is_read_as_keys_without_harm():
    """States and keys share the pool: the bits of a state may be NaN or infinite as keys."""
    spec, weights = SPECS["mamba2"], WEIGHTS["mamba2"]
    tokens = tokens_of(spec, 40)
    run = driver(spec, weights, dtype="bf16")
    want = run.run_alone("a", tokens, [40])[0]
    again = driver(spec, weights, dtype="bf16")
    for state in again.executor.cache.states:
        state.fill_(float("nan"))
    np.testing.assert_array_equal(again.run_alone("a", tokens, [40])[0], want)


def test_weights_are_read_in_parts(monkeypatch):
    """The memory that a load takes beside the weights themselves does not grow with them."""
    monkeypatch.setattr(weights_module, "_PART", 1 << 12)
    table = {"embed": float_tensor(np.random.default_rng(0).normal(size=(1 << 14, 64)))}
    load = Loader(table, torch.device("cpu"), torch.bfloat16)
    tracemalloc.start()
    loaded = load("embed")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18
    np.testing.assert_allclose(loaded.float(), table["embed"].dequantize(), rtol=2**-8)


def test_unknown_options_are_refused_by_name():
    spec, weights = SPECS["llama"], WEIGHTS["llama"]
    for options, message in (
        ({"dtype": "int3"}, "dtype='int3': must be one of 'auto', 'fp32', 'bf16', 'fp16'"),
        ({"weight_format": "q8"}, "weight_format='q8': must be one of 'auto', 'int8', 'q4'"),
        ({"device": "abacus"}, "device='abacus': must be 'cpu', 'cuda', or 'cuda:N'"),
        ({"device": "cuda:-1"}, "device='cuda:-1': must be"),
        ({"device": "cpu:1"}, "device='cpu:1': must be"),
        ({"device": 1}, "device=1: must be"),
        ({"device": "cuda:99"}, r"device='cuda:99': torch finds"),
        ({"num_threads": 0}, "num_threads=0: must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(spec, weights, **options)
    with pytest.raises(MemoryError, match=f"the KV pool of {1 << 40} blocks does not fit"):
        make(spec, weights, num_blocks=1 << 40)


def test_auto_is_bfloat16_unless_the_file_has_floats():
    spec, weights = replace(SPECS["llama"], has_logits=False), WEIGHTS["llama"]
    assert make(spec, weights, dtype="auto").decoder.embed.dtype == torch.float32
