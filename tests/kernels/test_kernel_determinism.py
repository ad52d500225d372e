"""A request's logits do not depend, bit for bit, on other requests, chunks or the number of threads."""

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, random_blocks, random_weights, rope, tiny_spec

from foreword import _native
from foreword.models.quants import Quant
from foreword.models.spec import LayerSpec, MoeSpec, weight_names

SPEC = tiny_spec(layers=(LayerSpec(rope(16)), LayerSpec(rope(16), 200)))
WEIGHTS = random_weights(SPEC)
TOKENS = np.random.default_rng(5).integers(0, SPEC.vocab_size, 700).tolist()
FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("q4", "bf16")]


def last_logits(chunks, spec=SPEC, weights=WEIGHTS, **options):
    tokens = [token % spec.vocab_size for token in TOKENS[: sum(chunks)]]
    return Driver(spec, weights, **options).run_alone("a", tokens, chunks)[-1]


def assert_same_bits(whole, parts, **options):
    """The logits after chunks of these sizes are those after the first ones."""
    want = last_logits(whole, **options)
    for chunks in parts:
        np.testing.assert_array_equal(last_logits(chunks, **options), want)


every_isa = pytest.mark.parametrize("isa", _native.isa_levels())


@pytest.mark.one_in(3)
@every_isa
@pytest.mark.parametrize(("weight_format", "kv_format"), FORMATS)
def test_chunks_do_not_change_a_bit(weight_format, kv_format, isa):
    parts = [1, 699], [512, 187, 1], [13, 300, 2, 385], [630, *[1] * 70]
    assert_same_bits([700], parts, weight_format=weight_format, kv_format=kv_format, isa=isa)


@pytest.mark.one_in(3)
@every_isa
@pytest.mark.parametrize(("weight_format", "kv_format"), FORMATS)
@pytest.mark.parametrize("name", ["latent", "indexer", "gated_norms", "connections"])
def test_chunks_of_latent_attention_do_not_change_a_bit(name, weight_format, kv_format, isa):
    spec = SPECS[name]
    options = {"weight_format": weight_format, "kv_format": kv_format, "isa": isa}
    assert_same_bits([200], [[1, 199], [13, 100, 2, 85]], spec=spec, weights=random_weights(spec), **options)


@pytest.mark.one_in(3)
@every_isa
@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q8_0, Quant.Q5_1])
def test_chunks_do_not_change_a_bit_of_weights_in_blocks(quant, isa):
    """The inputs of `down` are more than a product unpacks at once."""
    spec = tiny_spec(hidden_size=64, intermediate_size=3744, layers=(LayerSpec(rope(16)),))
    weights, rng = random_weights(spec), np.random.default_rng(4)
    weights |= {n: random_blocks(quant, s, rng) for n, s in weight_names(spec) if len(s) == 2}
    vectors, parts = [1, 5, 13, 30, 33, 30, 38], ([150], [40, 41, 69], [1, 100, 49])
    assert_same_bits(vectors, parts, spec=spec, weights=weights, weight_format="auto", kv_format="int8", isa=isa)


@pytest.mark.one_in(7)
@every_isa
@pytest.mark.parametrize(
    ("weight_format", "hidden_size", "intermediate_size", "whole"),
    [
        # Sums of `down` are kept between parts of its inputs, which end within a piece of the activations. Of few rows
        # all inputs are multiplied at once.
        *((weight_format, 64, 4512, [2] * 75) for weight_format in ("fp32", "bf16", "int8")),
        # A panel takes half of the first-level cache or more: in bf16 of `gate` and `up`, in 8 bit of `down`.
        *((weight_format, 416, 928, [3, *[7] * 21]) for weight_format in ("bf16", "int8")),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "chunks",
)
def test_chunks_do_not_change_a_bit_of_large_products(weight_format, hidden_size, intermediate_size, whole, isa):
    spec = tiny_spec(hidden_size=hidden_size, intermediate_size=intermediate_size, layers=(LayerSpec(rope(16)),))
    options = {"spec": spec, "weights": random_weights(spec), "weight_format": weight_format, "isa": isa}
    assert_same_bits(whole, ([150], [40, 41, 69], [100, 33, 17]), **options)


@pytest.mark.one_in(5)
@every_isa
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q4"])
def test_chunks_do_not_change_a_bit_of_layers_whose_mlps_differ_in_width(weight_format, isa):
    """None is as wide as whole blocks, and the numbers of one layer are where another has the rest of its last one."""
    moe = MoeSpec(4, 2, 34, shared_intermediate_size=68)
    spec = tiny_spec(intermediate_size=61, layers=(LayerSpec(rope(16)), LayerSpec(rope(16), moe=moe)) * 2)
    options = {"spec": spec, "weights": random_weights(spec), "weight_format": weight_format, "isa": isa}
    assert_same_bits([1] * 40, ([40], [5, 1, 34]), **options)


@pytest.mark.one_in(3)
@every_isa
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 7)])
def test_chunks_do_not_change_a_bit_with_wide_heads(head_dim, block_size, kv_format, isa):
    """In long chunks the scores and values are products of tiles, where there are such instructions."""
    layers = (LayerSpec(rope(head_dim)), LayerSpec(rope(head_dim), 50))
    spec = tiny_spec(num_heads=4, num_kv_heads=2, head_dim=head_dim, layers=layers, attn_softcap=20.0)
    options = {"weight_format": "fp32", "kv_format": kv_format, "isa": isa, "block_size": block_size}
    options |= {"spec": spec, "weights": random_weights(spec)}
    assert_same_bits([1, 5, 6, 7, 1, *[5] * 26], ([150], [40, 41, 69], [1, 100, 49]), **options)


@pytest.mark.parametrize("num_threads", [1, 3, 7])
@pytest.mark.parametrize(("weight_format", "kv_format"), FORMATS)
def test_threads_do_not_change_a_bit(weight_format, kv_format, num_threads):
    options = {"weight_format": weight_format, "kv_format": kv_format}
    chunks = [600, 98, 1, 1]
    want = last_logits(chunks, num_threads=2, **options)
    np.testing.assert_array_equal(last_logits(chunks, num_threads=num_threads, **options), want)


@pytest.mark.one_in(15)
@every_isa
@pytest.mark.parametrize(
    "name",
    [
        *("mamba2", "mamba1", "rg_lru", "gated_delta", "moe", "chunks", "beside", "aside", "latent_experts", "latent"),
        *("mixed_qkv", "late_experts", "indexer", "gated_norms", "connections", "connections_of_any_layers"),
    ],
)
def test_chunks_and_threads_do_not_change_a_bit_of_other_layers(name, isa):
    spec = SPECS[name]
    options = {"spec": spec, "weights": random_weights(spec), "weight_format": "bf16", "isa": isa}
    want = last_logits([200], num_threads=2, **options)
    for num_threads, chunks in ((1, [1, 199]), (3, [130, 2, 68]), (7, [170, *[1] * 30])):
        np.testing.assert_array_equal(last_logits(chunks, num_threads=num_threads, **options), want)


@pytest.mark.one_in(21)
@pytest.mark.parametrize(("weight_format", "kv_format"), [("fp32", "fp32"), ("int8", "int8")])
@pytest.mark.parametrize("name", SPECS)
def test_long_chunks_and_threads_do_not_change_a_bit(name, weight_format, kv_format):
    """Inputs, queries, keys, values and MLPs of more than 512 tokens are computed in parts."""
    spec = SPECS[name]
    options = {"spec": spec, "weights": random_weights(spec), "weight_format": weight_format, "kv_format": kv_format}
    want = last_logits([300, 300, 100], num_threads=1, **options)
    for num_threads, chunks in ((1, [700]), (3, [700]), (2, [1, 699])):
        np.testing.assert_array_equal(last_logits(chunks, num_threads=num_threads, **options), want)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q4"])
def test_long_chunks_do_not_change_a_bit_of_experts(weight_format, num_threads):
    """More than 512 choices are computed in parts, which end within an expert that has more."""
    spec = SPECS["moe"]
    assert any(700 * moe.experts_per_token > 512 * moe.num_experts for moe in (layer.moe for layer in spec.layers))
    options = {"spec": spec, "weights": random_weights(spec), "weight_format": weight_format}
    assert_same_bits([100] * 7, ([700], [1, 699]), num_threads=num_threads, **options)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("weight_format", "kv_format"), FORMATS)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "moe", "gemma", "mamba2", "mamba1", "rg_lru", "gated_delta", "chunks", "beside", "aside", "latent"),
        *("mixed_qkv", "late_experts", "narrow_values", "indexer", "gated_norms", "connections"),
    ],
)
def test_other_requests_do_not_change_a_bit(name, weight_format, kv_format):
    spec = SPECS[name]
    weights = random_weights(spec)
    rng = np.random.default_rng(6)
    sequences = {str(i): rng.integers(0, spec.vocab_size, 60).tolist() for i in range(7)}
    options = {"weight_format": weight_format, "kv_format": kv_format}
    alone = {n: Driver(spec, weights, **options).run_alone(n, t, [30, 1, 29])[-1] for n, t in sequences.items()}
    crowd = Driver(spec, weights, **options)
    for n, tokens in sequences.items():
        crowd.add(n, tokens)
    crowd.step({n: 10 + 5 * int(n) for n in sequences})
    crowd.step(dict.fromkeys(sequences, 1))
    together = crowd.step({n: 60 - 11 - 5 * int(n) for n in reversed(sequences)})
    for n in sequences:
        np.testing.assert_array_equal(together[n], alone[n])
