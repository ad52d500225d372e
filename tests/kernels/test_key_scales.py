"""The scales and the rotation of 8-bit keys: scores stay as they are, and unequal dimensions lose little."""

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, Reference, float_tensor, random_weights, relative_error, rope, tiny_spec

from foreword import _native
from foreword.executors.key_scales import key_scales
from foreword.models.spec import LayerSpec, RopeSpec


def hadamard(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def embedded(x, positions, rope: RopeSpec):
    """The rotary embedding of [T, heads, head_dim] in float64."""
    n = len(rope.inv_freq)
    turn = np.exp(1j * positions[:, None, None] * np.array(rope.inv_freq))
    pairs = (x[..., :n] + 1j * x[..., n : 2 * n]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * n :]], axis=-1)


def uneven(spec, factor=100.0):
    """Random weights of ``spec``, where a rotary pair of keys is larger by ``factor`` and of queries smaller."""
    weights = random_weights(spec)
    pairs = len(spec.layers[0].rope.inv_freq)
    for name in weights:
        leaf = name.split(".")[-1]
        if leaf in ("q_norm", "k_norm") if spec.qk_norm else leaf in ("q", "k", "q_bias", "k_bias"):
            values = weights[name].dequantize().copy()
            of_heads = values.reshape(-1, spec.head_dim, values.size // len(values))
            of_heads[:, [1, 1 + pairs]] *= factor if leaf[0] == "k" else 1 / factor
            weights[name] = float_tensor(values)
    return weights


@pytest.mark.parametrize("name", ["llama", "qkv_bias", "gemma", "odd_sizes"])
def test_scaled_and_rotated_queries_and_keys_have_the_same_scores(name):
    """In float64, where scales come before the rotary embedding or after it."""
    spec = SPECS[name]
    weights = uneven(spec)
    positions = np.arange(9.0)
    rng = np.random.default_rng(8)
    q = rng.normal(size=(9, spec.num_heads, spec.head_dim))
    k = rng.normal(size=(9, spec.num_kv_heads, spec.head_dim))
    rotation = hadamard(spec.head_dim & -spec.head_dim)
    rotation = np.kron(np.eye(spec.head_dim // len(rotation)), rotation)

    def scores(q, k):
        return np.einsum("thd,shd->hts", q, np.repeat(k, spec.num_heads // spec.num_kv_heads, axis=1))

    for i, layer in enumerate(spec.layers):
        of_rope = layer.rope or RopeSpec(())
        q_scales, k_scales = (
            s.astype(np.float64) for s in key_scales(spec, layer, weights, f"layers.{i}.", f"layers.{i}.attn_norm")
        )
        assert np.isfinite(q_scales).all()
        assert k_scales.max() / k_scales.min() > 50
        want = scores(embedded(q, positions, of_rope), embedded(k, positions, of_rope))
        before = embedded(q * q_scales, positions, of_rope), embedded(k * k_scales, positions, of_rope)
        after = embedded(q, positions, of_rope) * q_scales, embedded(k, positions, of_rope) * k_scales
        for x, y in (before, after):
            np.testing.assert_allclose(scores(x @ rotation, y @ rotation), want, atol=1e-5)


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}])
def test_keys_with_a_large_rotary_pair_lose_little(changes, isa):
    """One scale per head alone would give errors from 0.13 to 0.26."""
    spec = tiny_spec(**changes)
    weights = uneven(spec)
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, 70).tolist()
    want = Reference(spec, weights).logits(tokens)[-1]
    got = Driver(spec, weights, kv_format="int8", isa=isa).run_alone("a", tokens, [69, 1])[-1]
    assert relative_error(got, want) < 0.04


def test_dimensions_without_weights_have_finite_scales():
    spec = tiny_spec(qk_norm=True, layers=(LayerSpec(rope(16)),))
    weights = random_weights(spec)
    zeros = np.ones(16)
    zeros[[2, 10, 7]] = 0  # a whole rotary pair, and half of one
    for norm in ("q_norm", "k_norm"):
        weights[f"layers.0.{norm}"] = float_tensor(zeros)
    for scales in key_scales(spec, spec.layers[0], weights, "layers.0.", "layers.0.attn_norm"):
        np.testing.assert_allclose(scales, 1)
    weights["layers.0.k_norm"] = float_tensor(np.zeros(16))
    for scales in key_scales(spec, spec.layers[0], weights, "layers.0.", "layers.0.attn_norm"):
        assert np.isfinite(scales).all()
