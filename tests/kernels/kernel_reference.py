"""A decoder's forward pass as its spec defines it, in float64 with no cache, and small random models to run it on."""

from dataclasses import dataclass, field, replace
from math import erf

import numpy as np
import numpy.typing as npt

from foreword.models.quants import Quant
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import (
    AsideSpec,
    ClampedGate,
    ConnectionsSpec,
    DecoderSpec,
    HeadShape,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    MoeSpec,
    NormPlaces,
    PerLayerSpec,
    QKLayerNorm,
    QueryGrowth,
    RopeSpec,
    RouterSpec,
    StreamsSpec,
    weight_names,
)
from foreword.models.weights import Tensor

Floats = npt.NDArray[np.float64]
Kept = dict[int, tuple[Floats, Floats]]


def relative_error(got: npt.NDArray[np.floating], want: npt.NDArray[np.floating]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def of_steps(spec: DecoderSpec, bound: float, of_rounded: float = 0.1) -> float:
    """Return the bound on an error, or a larger one where inputs are rounded to 8 bits: there a difference may turn
    into one of a step. With an indexer, queries may see other keys where numbers are less exact than float32.
    """
    if spec.indexer is not None and bound > 1e-3:
        return 1.0
    return max(bound, of_rounded) if spec.rounds_inputs else bound


def fp32_error(spec: DecoderSpec) -> float:
    """The bound on the relative error of logits in fp32. The delta rule subtracts what the state already predicts and
    carries the rounding of that difference on: over 40 random prompts of 90 tokens it reaches 1.1e-5 (scalar 0.8e-5),
    every other kind of layer 0.5e-5."""
    delta = any(layer.recurrent is not None and layer.recurrent.kind == "gated_delta" for layer in spec.layers)
    return of_steps(spec, 3e-5 if delta else 1e-5, 0.03)


def float_tensor(values: npt.NDArray[np.floating]) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(-1, values.shape[-1])
    return Tensor(rows.view(np.uint8), Quant.F32, values.shape)


AROUND_ONE = ("sum_scale", "kept_scale", "embed_scale", "key_scale", "router_carry")
"""The ends of the names of factors."""


def random_weights(spec: DecoderSpec, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_names(spec):
        if name.endswith(("norm", *AROUND_ONE)):  # not a bias of one
            values = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("_bias"):
            values = rng.normal(0, 0.3, shape)
        else:
            values = rng.normal(0, 1.3 / np.sqrt(np.prod(shape[1:] or shape)), shape)
        weights[name] = float_tensor(values)
    return weights


def random_blocks(quant: Quant, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Random bits with sane scales: a half-precision field is overwritten with a small number."""
    rows, blocks = int(np.prod(shape[:-1])), shape[-1] // quant.block_size
    data = rng.integers(0, 256, (rows, blocks, quant.block_bytes), np.uint8)
    halves = {Quant.Q4_1: 2, Quant.Q5_1: 2, Quant.Q4_K: 2, Quant.Q5_K: 2}.get(quant, 1)
    typical = {
        Quant.Q8_0: 1e-3,
        Quant.Q3_K: 1e-3,
        Quant.Q4_K: 2e-4,
        Quant.Q5_K: 1e-4,
        Quant.Q6_K: 3e-5,
        Quant.IQ4_NL: 1e-3,
        Quant.IQ4_XS: 5e-5,
        Quant.IQ3_S: 5e-4,
        Quant.IQ3_XXS: 2e-4,
        Quant.IQ2_S: 4e-4,
        Quant.IQ2_XXS: 4e-4,
        Quant.IQ1_S: 5e-3,
        Quant.Q1_0: 0.1,
    }.get(quant, 0.01)
    start = quant.block_bytes - 2 if quant in (Quant.Q3_K, Quant.Q6_K, Quant.TQ1_0, Quant.TQ2_0) else 0
    scales = (typical * rng.uniform(0.5, 1.5, (rows, blocks, halves))).astype(np.float16)
    if quant in (Quant.Q4_1, Quant.Q5_1):
        scales[..., 1] *= np.float16(-10)
    if quant is Quant.MXFP4:
        data[..., 0] = rng.integers(119, 122, (rows, blocks))
    elif quant is Quant.NVFP4:  # numbers of E4M3 near 2^-7
        data[..., :4] = rng.integers(6, 12, (rows, blocks, 4))
    elif quant is Quant.IQ1_M:  # four bits of d in each of four words
        nibbles = scales[..., 0].view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        data[..., 49::2] = data[..., 49::2] & 15 | nibbles.astype(np.uint8) << 4
    else:
        data[..., start : start + 2 * halves] = scales.view(np.uint8)
    return Tensor(data.reshape(rows, -1), quant, shape)


def rope(dim: int, theta: float = 10000.0, scale: float = 1.0) -> RopeSpec:
    return RopeSpec(tuple(float(theta ** (-2 * j / dim)) for j in range(dim // 2)), scale)


MAMBA2 = RecurrentSpec("mamba2", 6, 2, 20, 12, conv_kernel=4, conv_bias=True)
SCALES = (0.8, 1.4, 0.5, 0.35, 1.2)
CONV = RecurrentSpec("short_conv", 1, 1, 0, 96, conv_kernel=3)
MAMBA1 = RecurrentSpec("mamba1", 1, 1, 10, 84, conv_kernel=4, conv_bias=True, rank=5)
NORMED_MAMBA1 = replace(MAMBA1, key_dim=18, value_dim=100, rank=20, inner_eps=1e-3, in_bias=True, o_bias=True)
LRU = RecurrentSpec("rg_lru", 1, 1, 1, 84, conv_kernel=4, conv_bias=True, rank=28, in_bias=True, o_bias=True)
WIDE_LRU = replace(LRU, value_dim=144, rank=48, conv_kernel=3)
MIXED = RecurrentSpec("mixed_qkv", 6, 2, 0, 16, 3, conv_bias=True, in_bias=True, heads_kernel=2)
TILED = RecurrentSpec("gated_delta", 6, 2, 10, 12, conv_kernel=2, tiled=True)
DELTA = RecurrentSpec("gated_delta", 4, 2, 16, 32, conv_kernel=3)
BY_CHANNEL = RecurrentSpec("gated_delta", 3, 3, 18, 20, conv_kernel=4, rank=20, channel_decays=True, sigmoid_gate=True)
FIXED = replace(MAMBA2, num_heads=6, num_key_heads=6, conv_kernel=1, conv_bias=False, normed="first", norm_eps=1e-3)
FIXED = replace(FIXED, sigmoid_gate=True, joint_norm=True)
BOUNDED = replace(TILED, value_dim=84, channel_decays=True, least_log=-4.0, sigmoid_gate=True)
WIDE = replace(DELTA, write_scale=2.0, norm_eps=1e-5)


def tiny_spec(**changes: object) -> DecoderSpec:
    """Two layers, three query heads per KV head."""
    spec = DecoderSpec(
        architecture="tiny",
        vocab_size=301,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=2048,
        layers=(LayerSpec(rope(16)), LayerSpec(rope(16))),
        norm_eps=1e-5,
        query_scale=0.25,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def taking(*, unit_qk_eps: float | None = 1e-6, moe: MoeSpec | None = None) -> LayerSpec:
    return LayerSpec(rope(8), moe=moe, beside=True, takes_qkv=True, unit_qk_eps=unit_qk_eps)


SPECS: dict[str, DecoderSpec] = {
    "llama": tiny_spec(),
    "tied": tiny_spec(tie_embeddings=True, embedding_scale=9.5),
    "odd_sizes": tiny_spec(
        vocab_size=77,
        hidden_size=52,
        intermediate_size=100,
        num_heads=4,
        num_kv_heads=4,
        head_dim=20,
        layers=(LayerSpec(rope(12)), LayerSpec(None)),
    ),
    "qkv_bias": tiny_spec(qkv_bias=True),
    "gemma": tiny_spec(
        qk_norm=True,
        post_norms=True,
        attn_softcap=4.0,
        final_softcap=3.0,
        activation="gelu_tanh",
        layers=(LayerSpec(rope(16, 100.0), 24), LayerSpec(rope(16)), LayerSpec(rope(16, 100.0), 24)),
    ),
    "moe": tiny_spec(
        layers=(
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64)),
            LayerSpec(rope(16), moe=MoeSpec(4, 3, 96, norm_topk=False, shared_intermediate_size=64)),
        )
    ),
    "mamba2": tiny_spec(
        layers=(LayerSpec(None, recurrent=MAMBA2), LayerSpec(rope(16)), LayerSpec(None, recurrent=MAMBA2))
    ),
    "mamba1": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=MAMBA1, has_mlp=False),
            LayerSpec(rope(16)),
            LayerSpec(None, recurrent=MAMBA1),
        )
    ),
    "rg_lru": tiny_spec(
        layers=(LayerSpec(None, recurrent=LRU), LayerSpec(rope(8)), LayerSpec(None, recurrent=LRU)), mlp_bias=True
    ),
    "mixed_qkv": tiny_spec(
        qkv_bias=False,
        o_bias=True,
        key_scales=True,
        scaled_sums=True,
        layers=(
            LayerSpec(None, recurrent=MIXED, has_mlp=False),
            taking(moe=MoeSpec(5, 1, 64, norm_topk=False, router_bias=True, empties=2, router=RouterSpec(36, False))),
            LayerSpec(None, recurrent=MIXED, has_mlp=False),
            taking(moe=MoeSpec(4, 2, 64, router_bias=True, identities=1, empties=2, router=RouterSpec(36, True))),
            LayerSpec(None, recurrent=MIXED, has_mlp=False),
            taking(),
        ),
    ),
    "mixed_heads": tiny_spec(
        num_heads=3,
        num_kv_heads=1,
        head_dim=20,
        layers=(
            LayerSpec(
                None,
                recurrent=replace(MIXED, num_heads=3, num_key_heads=1, value_dim=20, heads_kernel=3),
                has_mlp=False,
            ),
            taking(unit_qk_eps=None),
        ),
    ),
    "lru_alone": tiny_spec(
        layers=(LayerSpec(None, recurrent=WIDE_LRU, has_mlp=False), LayerSpec(None, recurrent=WIDE_LRU))
    ),
    "aside": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=MAMBA2, has_mlp=False),
            *(LayerSpec(rope(16), aside=AsideSpec(0, 5, 7)), LayerSpec(None, recurrent=MAMBA2, has_mlp=False)),
            *(LayerSpec(None, aside=AsideSpec(1, 0, 7)), LayerSpec(rope(16))),
            *(LayerSpec(rope(16), aside=AsideSpec(0, 5, 7)), LayerSpec(None, recurrent=MAMBA2)),
        ),
        activation="gelu_tanh",
        norm_eps=1.0,  # since rounding errors of averages would be as large as these
    ),
    "aside_alike": tiny_spec(
        layers=(LayerSpec(rope(16), aside=AsideSpec(0)), LayerSpec(None, recurrent=MAMBA1, has_mlp=False)) * 2,
        norm_eps=1.0,
    ),
    "states_alone": tiny_spec(layers=(LayerSpec(None, recurrent=NORMED_MAMBA1, has_mlp=False),) * 3),
    "gated_delta": tiny_spec(
        attn_gate=True,
        qk_norm=True,
        norm_eps=1e-3,
        layers=(
            LayerSpec(rope(16)),
            LayerSpec(None, recurrent=DELTA, moe=MoeSpec(5, 2, 64)),
            LayerSpec(None, recurrent=DELTA),
        ),
    ),
    "channel_decays": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        mla=MlaSpec(0, 20, 12, 8, 18),
        layers=(
            LayerSpec(None, recurrent=BY_CHANNEL),
            LayerSpec(None, moe=MoeSpec(5, 2, 64, scoring="sigmoid", router_bias=True)),
            LayerSpec(None, recurrent=BY_CHANNEL),
        ),
    ),
    "bounded_decays": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        attn_gate=True,
        head_gates=True,
        mla=MlaSpec(24, 20, 12, 8, 18),
        layers=(LayerSpec(None, recurrent=BOUNDED), LayerSpec(rope(8)), LayerSpec(None, recurrent=BOUNDED)),
    ),
    "kept_inputs": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=FIXED, mixer_scale=0.7, mlp_scale=1.1, kept=(1.5, 0.8)),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64), mixer_scale=0.6, kept=(0.9, 1.2)),
            LayerSpec(None, recurrent=FIXED),
        )
    ),
    "norms_of_sums": tiny_spec(  # the norm of a sum is the one before the next mixer or MLP
        layer_norm=True,
        gated_mlp=False,
        mlp_bias=True,
        o_bias=True,
        layers=tuple(
            LayerSpec(rope(16), norms=NormPlaces(i > 0, False, True, False), kept=(1.0, 1.0)) for i in range(3)
        ),
    ),
    "norms_by_kind": tiny_spec(
        qk_norm=True,
        joint_qk_norm=True,
        norm_eps=1e-2,
        layers=(
            LayerSpec(None, recurrent=WIDE, norms=NormPlaces(True, False, True, False)),
            LayerSpec(rope(16), norms=NormPlaces(False, True, False, True)),
            LayerSpec(None, norms=NormPlaces(True, False, False, True)),
        ),
    ),
    "post_norms_alone": tiny_spec(
        pre_norms=False,
        post_norms=True,
        qkv_bias=True,
        qk_norm=True,
        joint_qk_norm=True,
        layers=(LayerSpec(rope(16), 24), LayerSpec(rope(16))),
    ),
    "multipliers": tiny_spec(
        embedding_scale=3.0,
        residual_scale=0.4,
        logit_scale=0.3,
        layers=(
            LayerSpec(rope(16)),
            LayerSpec(None, moe=MoeSpec(5, 2, 64, shared_intermediate_size=48, shared_gate=False)),
        ),
    ),
    "layer_norm": tiny_spec(
        layer_norm=True, gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True, activation="gelu_tanh"
    ),
    "parallel": tiny_spec(
        layer_norm=True,
        parallel_mlp=True,
        qk_scales=True,
        layers=(LayerSpec(rope(16), 24, unit_qk_eps=1e-3), LayerSpec(None, unit_qk_eps=1e-3)),
    ),
    "two_parallel_norms": tiny_spec(
        layer_norm=True,
        parallel_mlp=True,
        parallel_norm=True,
        gated_mlp=False,
        qkv_bias=True,
        mlp_bias=True,
        layers=(LayerSpec(rope(8)), LayerSpec(rope(16)), LayerSpec(rope(16), moe=MoeSpec(5, 2, 64))),
    ),
    "parallel_experts": tiny_spec(
        parallel_mlp=True,
        layers=(
            LayerSpec(rope(16), 24, moe=MoeSpec(5, 2, 64, shared_intermediate_size=48, shared_gate=False)),
            LayerSpec(None, moe=MoeSpec(5, 2, 64)),
            LayerSpec(rope(16), 24),
        ),
    ),
    "biased_experts": tiny_spec(
        mlp_bias=True,
        layers=(
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, shared_intermediate_size=48)),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, shared_intermediate_size=48, shared_gate=False)),
        ),
    ),
    "positions": tiny_spec(
        layer_norm=True, num_positions=2048, embedding_scale=1.5, layers=(LayerSpec(None, 24), LayerSpec(None))
    ),
    "embed_norm": tiny_spec(num_positions=2048, embed_norm=True, logits_bias=True, final_softcap=3.0, logit_scale=0.6),
    "logits_bias": tiny_spec(layer_norm=True, embed_norm=True, logits_bias=True, vocab_size=700),
    "gate_bias": tiny_spec(qkv_bias=True, o_bias=True, attn_gate=True),
    "head_gates": tiny_spec(qkv_bias=True, attn_gate=True, head_gates=True),
    "inner_norms": tiny_spec(inner_norms=True, activation="relu2", o_bias=True, attn_gate=True),
    "inner_norms_of_odd_sizes": tiny_spec(
        inner_norms=True,
        activation="gelu_tanh",
        gated_mlp=False,
        mlp_bias=True,
        hidden_size=52,
        intermediate_size=100,
        num_heads=3,
        num_kv_heads=3,
        head_dim=20,
        layers=(LayerSpec(rope(12)), LayerSpec(None, 24)),
    ),
    "xielu": tiny_spec(xielu=True, gated_mlp=False, qk_norm=True),
    "xielu_of_odd_sizes": tiny_spec(xielu=True, gated_mlp=False, mlp_bias=True, hidden_size=52, intermediate_size=100),
    "rounded_inputs": tiny_spec(inner_norms=True, rounds_inputs=True, activation="relu2"),
    "latent_biases": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        qkv_bias=True,
        o_bias=True,
        mla=MlaSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18),
        layers=(LayerSpec(rope(8)), LayerSpec(rope(8))),
    ),
    "latent_bias_of_keys": tiny_spec(
        num_kv_heads=1, head_dim=28, qkv_bias=True, mla=MlaSpec(0, 20, 12, 8, 18), layers=(LayerSpec(rope(8)),)
    ),
    "state_biases": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=replace(MAMBA2, in_bias=True, o_bias=True)),
            LayerSpec(rope(16)),
            LayerSpec(None, recurrent=replace(MAMBA2, in_bias=True, o_bias=True), moe=MoeSpec(5, 2, 64)),
        )
    ),
    "scaled_state_biases": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=replace(MAMBA2, scales=SCALES, in_bias=True), mixer_scale=0.7),
            LayerSpec(rope(16)),
        )
    ),
    "conv_biases": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=replace(CONV, conv_bias=True, in_bias=True, o_bias=True)),
            LayerSpec(rope(16)),
        )
    ),
    "sinks": tiny_spec(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        clamped_gate=ClampedGate(1.7, 0.5),
        layers=(
            LayerSpec(rope(16), 24, moe=MoeSpec(5, 2, 64, scores_bias=True), has_sinks=True),
            LayerSpec(rope(16), has_sinks=True),
            LayerSpec(rope(16), 24),
        ),
    ),
    "latent": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        mla=MlaSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18),
        layers=(
            LayerSpec(rope(8)),
            LayerSpec(
                rope(8), moe=MoeSpec(8, 3, 64, scoring="sigmoid", router_bias=True, num_groups=4, groups_per_token=2)
            ),
            LayerSpec(rope(8), moe=MoeSpec(8, 2, 64, num_groups=2)),
        ),
    ),
    "latent_of_one_product": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        mla=MlaSpec(0, 20, 12, 8, 18, kv_scale=1.7),
        layers=(LayerSpec(rope(8)), LayerSpec(rope(8))),
    ),
    "indexer": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        mla=MlaSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18),
        indexer=IndexerSpec(num_heads=9, head_dim=20, topk=33, norm_eps=1e-5),
        layers=(LayerSpec(rope(8)), LayerSpec(rope(8), takes_chosen=True), LayerSpec(rope(8))),
    ),
    "gated_norms": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        attn_gate=True,
        qkv_bias=True,
        mla=MlaSpec(q_rank=20, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18, joins_latents=True),
        indexer=IndexerSpec(num_heads=9, head_dim=20, topk=33),
        layers=(
            LayerSpec(rope(8), attn_norm_rank=5),
            LayerSpec(
                rope(8),
                attn_norm_rank=40,
                mlp_norm_rank=20,
                moe=MoeSpec(
                    *(8, 3, 64),
                    scoring="sigmoid",
                    router_bias=True,
                    num_groups=4,
                    groups_per_token=2,
                    zeroes_groups=True,
                    shared_intermediate_size=48,
                    shared_gate=False,
                ),
            ),
            LayerSpec(rope(8), mlp_norm_rank=20, takes_chosen=True),
        ),
    ),
    "gated_norms_of_heads": tiny_spec(
        hidden_size=52,
        layer_norm=True,
        num_kv_heads=1,
        head_dim=28,
        attn_gate=True,
        mla=MlaSpec(0, 20, 12, 8, 18),
        layers=(LayerSpec(rope(8), attn_norm_rank=70, mlp_norm_rank=3), LayerSpec(None)),
    ),
    "short_conv": tiny_spec(
        qk_norm=True,
        layers=(
            LayerSpec(
                None, recurrent=CONV, moe=MoeSpec(5, 2, 64, scoring="sigmoid", router_bias=True, scale=1.5, sum_eps=0.2)
            ),
            LayerSpec(rope(16)),
            LayerSpec(None, recurrent=CONV),
        ),
    ),
    "single_parts": tiny_spec(  # layers with a mixer alone, or an MLP alone
        activation="relu2",
        gated_mlp=False,
        layers=(
            LayerSpec(None, recurrent=TILED, has_mlp=False),
            LayerSpec(None, has_mixer=False),
            LayerSpec(rope(16), has_mlp=False),
            LayerSpec(None, recurrent=TILED),
        ),
    ),
    "chunks": tiny_spec(
        layers=(
            LayerSpec(rope(16), 24, chunked=True, unit_qk_eps=1e-3),
            LayerSpec(
                None,
                query_growth=QueryGrowth(7, 0.4, offset=2),
                moe=MoeSpec(
                    5,
                    2,
                    64,
                    False,
                    shared_intermediate_size=48,
                    shared_gate=False,
                    scoring="sigmoid",
                    scales_inputs=True,
                ),
            ),
            LayerSpec(rope(16), 24, chunked=True),
        )
    ),
    "beside": tiny_spec(
        gate_scale=0.6,
        layers=(
            LayerSpec(None, recurrent=replace(MAMBA2, normed="never", scales=SCALES), has_mlp=False, mixer_scale=0.7),
            LayerSpec(rope(16), beside=True, mixer_scale=1.2, mlp_scale=0.8),
            LayerSpec(None, recurrent=replace(MAMBA2, normed="never", scales=SCALES), has_mlp=False),
            LayerSpec(rope(16), beside=True),
        ),
    ),
    "normed_first": tiny_spec(
        layers=(
            LayerSpec(None, recurrent=replace(MAMBA2, normed="first", least_step=0.5), has_mlp=False),
            LayerSpec(rope(16), beside=True),
        )
    ),
    "latent_experts": tiny_spec(
        activation="relu2",
        gated_mlp=False,
        layers=(
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, shared_intermediate_size=48, shared_gate=False, latent_size=40)),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, scoring="sigmoid", latent_size=20)),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, latent_size=150)),  # more than hidden_size
        ),
    ),
    "own_inputs": tiny_spec(  # keys that later layers read, values that are keys, wider heads in some layers
        qk_norm=True,
        activation="gelu_tanh",
        post_norms=True,
        per_layer=PerLayerSpec(12, vocab_size=301, norm_eps=1e-3, embedding_scale=3.0, scale=0.7),
        layer_scales=True,
        layers=(
            LayerSpec(rope(16), 24, unit_v=True),
            LayerSpec(rope(28), heads=HeadShape(3, 28, 6, 28), unit_v=True, values_are_keys=True),
            LayerSpec(rope(28), heads=HeadShape(3, 28, 6, 28), reads_layer=1, intermediate_size=208),
            LayerSpec(rope(16), 24, reads_layer=0),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, shared_intermediate_size=160, shared_gate=False, own_norms=True)),
        ),
    ),
    "heads_by_layer": tiny_spec(
        qk_norm=True,
        qkv_bias=True,
        attn_gate=True,
        head_gates=True,
        softplus_gates=True,
        layers=(
            LayerSpec(rope(8), has_sinks=True),
            LayerSpec(
                rope(16),
                24,
                heads=HeadShape(2, 16, 10, 16),
                moe=MoeSpec(5, 2, 64, scoring="sigmoid", softcap=1.5),
                has_sinks=True,
            ),
            LayerSpec(rope(16), 24, heads=HeadShape(2, 16, 2, 16), has_sinks=True),
        ),
    ),
    "narrow_values": tiny_spec(
        value_dim=12,
        qkv_bias=True,
        attn_gate=True,
        layers=(LayerSpec(rope(16), 24, has_sinks=True), LayerSpec(rope(8), heads=HeadShape(3, 16, 6, 12))),
    ),
    "wide_values": tiny_spec(value_dim=44, attn_softcap=3.0, clip_qkv=0.5),
    "slopes": tiny_spec(
        slopes=(0.5, 0.25, 2.0, 0.02, 0.0, 0.7),
        clip_qkv=0.3,
        qkv_bias=True,
        attn_gate=True,
        layers=(LayerSpec(None), LayerSpec(None, 24), LayerSpec(rope(16), 24, chunked=True)),
    ),
    "joint_limit": tiny_spec(qk_norm=True, joint_qk_norm=True, clip_qkv=0.5, qkv_bias=True),
    "sparse_mix": tiny_spec(layers=(LayerSpec(rope(16), moe=MoeSpec(6, 2, 64, norm_topk=False, sparse_mix=0.4)),) * 2),
    "softplus_gates": tiny_spec(attn_gate=True, softplus_gates=True),
    "biased_softmax": tiny_spec(
        layers=(
            LayerSpec(rope(16), moe=MoeSpec(7, 3, 64, router_bias=True)),
            LayerSpec(rope(16), moe=MoeSpec(8, 2, 64, router_bias=True, num_groups=4, groups_per_token=2)),
        )
    ),
    "outputs_ranked": tiny_spec(
        layers=(
            LayerSpec(rope(16), moe=MoeSpec(7, 3, 64, scoring="sigmoid", router_bias=True, ranks_outputs=True)),
            LayerSpec(rope(16), moe=MoeSpec(5, 4, 64, router_bias=True, scale=3.0, identities=6)),
        )
    ),
    "late_experts": tiny_spec(
        residual_scale=0.8,
        layers=(
            LayerSpec(rope(16), late_moe=MoeSpec(5, 4, 64, norm_topk=False, router_bias=True, identities=3)),
            LayerSpec(rope(16), late_moe=MoeSpec(4, 2, 64)),
            LayerSpec(rope(16)),
        ),
    ),
    "centred": tiny_spec(
        qk_norm=True,
        qk_layer_norm=QKLayerNorm(has_bias=True),
        head_dim=20,
        layers=(LayerSpec(rope(8)), LayerSpec(None)),
    ),
    "centred_heads": tiny_spec(qk_norm=True, qk_layer_norm=QKLayerNorm(of_heads=True), head_dim=20, qkv_bias=True),
    "dense_head": tiny_spec(head_dense=True, layer_norm=True, embed_norm=True, activation="gelu_tanh", logit_scale=0.7),
    "streams": tiny_spec(
        qk_norm=True,
        activation="gelu_tanh",
        post_norms=True,
        per_layer=PerLayerSpec(12, vocab_size=301, norm_eps=1e-3, embedding_scale=3.0, scale=0.7),
        streams=StreamsSpec(3, laurel_rank=20),
        layers=(LayerSpec(rope(16), gate_cutoff=0.7), LayerSpec(rope(16), 24), LayerSpec(rope(16), gate_cutoff=-0.4)),
    ),
    "connections": tiny_spec(
        num_kv_heads=1,
        head_dim=28,
        attn_gate=True,
        qkv_bias=True,
        o_bias=True,
        mla=MlaSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=18),
        indexer=IndexerSpec(num_heads=9, head_dim=20, topk=33),
        connections=ConnectionsSpec(3, magnitude=1.7, eps=0.02),
        layers=(
            LayerSpec(rope(8), has_sinks=True),
            LayerSpec(
                rope(8),
                has_sinks=True,
                takes_chosen=True,
                moe=MoeSpec(
                    *(8, 3, 64),
                    scoring="sigmoid",
                    router_bias=True,
                    gate_limit=0.3,
                    shared_intermediate_size=48,
                    shared_gate=False,
                ),
            ),
            LayerSpec(rope(8)),
        ),
    ),
    "connections_of_any_layers": tiny_spec(
        hidden_size=52,
        layer_norm=True,
        mlp_bias=True,
        o_bias=True,
        activation="gelu_tanh",
        connections=ConnectionsSpec(5, magnitude=0.6, eps=0.0),
        layers=(
            LayerSpec(rope(16), 24),
            LayerSpec(None, recurrent=MAMBA2, moe=MoeSpec(5, 2, 64, gate_limit=0.3, identities=2)),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64, shared_intermediate_size=48)),
        ),
    ),
    "runs": tiny_spec(  # layers that run again, with keys and values of each run
        attn_gate=True,
        qkv_bias=True,
        layers=(
            *(LayerSpec(rope(16), stream=0), LayerSpec(rope(16), 24)),
            *(LayerSpec(rope(16), stream=0, weights_of=0), LayerSpec(rope(16), 24, weights_of=1)),
            LayerSpec(None, stream=1),
            *(LayerSpec(rope(16), stream=0, weights_of=0), LayerSpec(rope(16), 24, weights_of=1)),
            LayerSpec(None, stream=1, weights_of=4),
        ),
    ),
    "runs_of_any_layers": tiny_spec(
        hidden_size=52,
        layer_norm=True,
        layers=(
            LayerSpec(rope(16), stream=1, moe=MoeSpec(5, 2, 64)),
            LayerSpec(None, recurrent=replace(MAMBA2, in_bias=True), stream=1),
            LayerSpec(rope(16), moe=MoeSpec(5, 2, 64), weights_of=0, stream=0),
            LayerSpec(None, recurrent=replace(MAMBA2, in_bias=True), weights_of=1),
        ),
    ),
    "many_heads": tiny_spec(num_heads=14, num_kv_heads=2, head_dim=32, layers=(LayerSpec(rope(32)),), hidden_size=64),
    "one_kv_head": tiny_spec(num_heads=56, num_kv_heads=1, head_dim=8, layers=(LayerSpec(rope(8)),), hidden_size=64),
}


@dataclass
class Reference:
    """Logits [T, V] of whole sequences, every position attending to its own past."""

    spec: DecoderSpec
    weights: dict[str, Tensor]
    merged: dict[str, Floats] = field(default_factory=dict)  # matrices of layers aside
    qkv: tuple[Floats, ...] = ()  # heads that the next layer takes
    routed: Floats | None = None  # what the last router carries
    chosen: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # by the last indexer

    def logits(self, tokens: list[int]) -> Floats:
        spec = self.spec
        x = self._w("embed")[np.array(tokens)] * spec.embedding_scale
        x = x + self._w("positions")[: len(tokens)] if spec.num_positions else x
        x = self._residual_norm(x, "embed_norm") if spec.embed_norm else x
        x = (x + self._w("embed_bias")) * self._w("embed_scale") if spec.scaled_sums else x
        first, aside, x0 = x, 0, x
        inputs = spec.per_layer and self._own_inputs(x, tokens, spec.per_layer)
        kept: Kept = {}
        late: dict[int, Floats] = {}
        runs, run = [self._w("stream_begin"), x] if spec.layers[0].stream is not None else [], 1
        streams = [x, *(_like(x @ self._w(f"stream_in.{k}").T, x) for k in self._others)]
        connected = spec.connections and np.repeat(x[:, None], spec.connections.num_streams, axis=1)
        for i, layer in enumerate(spec.layers):
            p = f"layers.{i if layer.weights_of is None else layer.weights_of}."
            if layer.stream is not None:
                runs[run] = self._residual_norm(x, "final_norm") if i else x
                run, x = layer.stream, runs[0] + runs[1]
            if spec.streams:
                streams = self._predicted(p, streams)
                x = streams[0]
            if layer.aside:
                aside = self._aside(p, layer, x, first, kept, i)
                continue
            if spec.connections:
                x, post = self._collapsed(p + "attn_mix", connected, spec.connections)
            unmixed = x
            norms = layer.norms or (spec.pre_norms, spec.post_norms) * 2
            if layer.has_mixer:
                before = x0, f"layers.{i - 1}.attn_norm"
                x0 = x0 if layer.beside else x
                own, aside = x + aside, 0
                h = self._residual_norm(*(before if layer.beside else (own, p + "attn_norm"))) if norms[0] else own
                h = self._gated(self._rounded(h), p + "attn_norm", layer.attn_norm_rank)
                r = layer.recurrent
                if r is not None and r.kind == "mixed_qkv":
                    self.qkv = self._mixed(p + "state.", r, h)
                    continue
                a = self._recurrent(p + "state.", r, h) if r else self._attention(p, layer, h, kept, i)
                a = self._residual_norm(a, p + "post_attn_norm") if norms[1] else a
                if spec.connections:
                    connected = connected + post[..., None] * a[:, None]
                    x, post = self._collapsed(p + "mlp_mix", connected, spec.connections)
                x = x if layer.kept is None else layer.kept[0] * h
                a = 0 if spec.connections else a
                x = self._scaled_sum(p + "attn_", x, a, spec.residual_scale * layer.mixer_scale)
                if spec.streams:
                    low = h @ self._w(p + "laurel_left").T @ self._w(p + "laurel_right").T
                    x = (x + h + self._residual_norm(low, p + "laurel_norm")) / np.sqrt(2)
            if layer.has_mlp:
                if spec.parallel_norm or not spec.parallel_mlp:
                    own = unmixed if spec.parallel_norm else x
                    h = self._rounded(self._residual_norm(own, p + "mlp_norm") if norms[2] else own)
                    h = self._gated(h, p + "mlp_norm", layer.mlp_norm_rank)
                m = self._mlp(p, h, layer.gate_cutoff) if layer.moe is None else self._moe(p, layer.moe, h, x)
                m = self._residual_norm(m, p + "post_mlp_norm") if norms[3] else m
                if layer.late_moe is not None:
                    late[i + 1] = self._moe(p, layer.late_moe, h, x)
                connected = connected + post[..., None] * m[:, None] if spec.connections else None
                x = x if layer.kept is None else layer.kept[1] * h
                x = self._scaled_sum(p + "mlp_", x, m, spec.residual_scale * layer.mlp_scale)
            x = x + late.get(i, 0)
            if spec.streams:
                factors, change = 1 + self._routed(p, x) @ self._w(p + "streams_correct").T, x - streams[0]
                streams = [stream + factors[:, k : k + 1] * change for k, stream in enumerate(streams)]
                x = streams[0] * self._w(p + "streams_scale")
            if inputs is not None:
                gate = self._act(x @ self._w(p + "per_layer_gate").T)
                own = (gate * inputs[:, i]) @ self._w(p + "per_layer_out").T
                own = self._residual_norm(own, p + "post_per_layer_norm")
                x = x + own
                streams[1:] = [stream + own for stream in streams[1:]]
            x = x * self._w(p + "layer_scale") if spec.layer_scales else x
        x = self._collapsed("out_mix", connected, spec.connections)[0] if spec.connections else x
        if spec.streams:
            out = [_like(streams[k] @ self._w(f"stream_out.{k}").T, streams[0]) for k in self._others]
            x = sum(out, streams[0]) / spec.streams.num_streams
        head = self._w("embed" if spec.tie_embeddings else "lm_head")
        x = self._residual_norm(x, "final_norm")
        if spec.head_dense:
            x = self._residual_norm(self._act(x @ self._w("head_dense").T), "head_norm")
        logits = x @ head.T * spec.logit_scale
        return _cap(logits + self._bias("logits_bias", spec.logits_bias), spec.final_softcap)

    def _scaled_sum(self, p: str, x: Floats, own: Floats, factor: float) -> Floats:
        if not self.spec.scaled_sums:
            return x + factor * own
        left, right = (
            (v + self._w(p + n + "_bias")) * self._w(p + n + "_scale") for v, n in ((own, "sum"), (x, "kept"))
        )
        return left + right

    def _mixed(self, p: str, r: RecurrentSpec, h: Floats) -> tuple[Floats, ...]:
        """Compressed convolutional attention (arXiv 2510.04476), token by token: of queries, keys and values."""
        n, dim, group = len(h), r.value_dim, r.num_heads // r.num_key_heads
        q, k, v = (h @ self._w(p + s).T + self._bias(f"{p}{s}_in_bias", r.in_bias) for s in "qkv")
        both, conv, of_heads = np.concatenate([q, k], 1), self._w(p + "conv"), self._w(p + "heads_conv")
        out = np.zeros_like(both)

        def by_channel(t: int) -> Floats:
            inputs = [(both[t - back] if t >= back else 0 * both[0]) for back in range(r.conv_kernel)]
            return sum((conv[:, -1 - back] * u for back, u in enumerate(inputs)), self._w(p + "conv_bias"))

        for t in range(n):
            for o in range(out.shape[1]):
                own = slice(o // dim * dim, (o // dim + 1) * dim)
                taps = range(r.heads_kernel)
                out[t, o] = sum(of_heads[o, :, -1 - back] @ by_channel(t - back)[own] for back in taps)
        out += self._w(p + "heads_conv_bias")
        late = h @ self._w(p + "late_v").T
        late = np.concatenate([0 * late[:1], late[:-1]]) + self._bias(p + "late_v_in_bias", r.in_bias)
        q, k = q.reshape(n, -1, dim), k.reshape(n, -1, dim)
        rest = (q + np.repeat(k, group, axis=1)) / 2
        of_keys = np.stack([rest[:, j * group : (j + 1) * group].mean(1) for j in range(r.num_key_heads)], 1)
        mixed = out.reshape(n, -1, dim) + np.concatenate([rest, of_keys], 1)
        return mixed[:, : r.num_heads], mixed[:, r.num_heads :], np.concatenate([v, late], 1).reshape(n, -1, dim)

    def _aside(self, p: str, layer: LayerSpec, x: Floats, first: Floats, kept: Kept, index: int) -> Floats:
        """With the matrices that the products of low rank, those of the block and their changes by an adapter add up
        to.
        """
        block, of = f"blocks.{layer.aside.block}.", layer.aside
        lows = {name: f"{name}_low" for name in "qkv" if of.attention_rank}
        lows |= {name: "mlp_low" for name in ("gate", "up") if of.mlp_rank}
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            own = self._w(f"{p}{name}_high") @ self._w(p + lows[name]) if name in lows else 0
            change = self._w(p + name) if p + name in self.weights else 0
            self.merged[p + name] = self._w(block + name) + own + change
        h = _norm(np.concatenate([x, first], 1), self._w(block + "attn_norm"), self.spec.norm_eps)
        u = self._residual_norm(self._attention(p, layer, h, kept, index), block + "mlp_norm")
        return self._mlp(p, u) @ self._w(p + "aside").T

    def _collapsed(self, name: str, streams: Floats, of: ConnectionsSpec) -> tuple[Floats, Floats]:
        """Token by token: the sum of the streams, and the factors of what is added to them."""
        matrix, base, scale = (self._w(name + end) for end in ("", "_base", "_scale"))
        sums, factors, count = [], [], of.num_streams
        for each in streams:
            mixes = matrix @ (each.ravel() / np.sqrt((each**2).mean() + self.spec.norm_eps))
            gates = [1 / (1 + np.exp(-(scale[i // count] * mix + base[i]))) for i, mix in enumerate(mixes)]
            sums.append(sum((gate + of.eps) * stream for gate, stream in zip(gates, each, strict=False)))
            factors.append([of.magnitude * gate + of.eps for gate in gates[count:]])
        return np.array(sums), np.array(factors)

    @property
    def _others(self) -> range:
        return range(1, self.spec.streams.num_streams) if self.spec.streams else range(0)

    def _routed(self, p: str, x: Floats) -> Floats:
        return np.tanh(self._residual_norm(x, p + "streams_norm") / x.shape[1] @ self._w(p + "streams_router").T)

    def _predicted(self, p: str, streams: list[Floats]) -> list[Floats]:
        count, factors = len(streams), self._routed(p, streams[0]) @ self._w(p + "streams_predict").T
        each = range(count)
        return [streams[k] + sum(factors[:, [k * count + j]] * streams[j] for j in each) for k in each]

    def _own_inputs(self, x: Floats, tokens: list[int], of: PerLayerSpec) -> Floats:
        each = [np.arange(i * of.size, (i + 1) * of.size) for i in range(self.spec.num_layers)]
        embed, project = self._w("per_layer_embed")[tokens], x @ self._w("per_layer_in").T
        weight = self._w("per_layer_norm")
        normed = [_norm(project[:, at], weight, of.norm_eps) + of.embedding_scale * embed[:, at] for at in each]
        return of.scale * np.stack(normed, axis=1)

    def _residual_norm(self, x: Floats, name: str) -> Floats:
        if not self.spec.layer_norm:
            return _norm(x, self._w(name), self.spec.norm_eps)
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.spec.norm_eps) * self._w(
            name
        ) + self._w(name + "_bias")

    def _gated(self, y: Floats, norm: str, rank: int) -> Floats:
        if not rank:
            return y
        return y / (1 + np.exp(-_silu(y @ self._w(norm + "_low").T) @ self._w(norm + "_high").T))

    def _w(self, name: str) -> Floats:
        if name in self.merged:
            return self.merged[name]
        return self.weights[name].dequantize().astype(np.float64)

    def _bias(self, name: str, is_there: bool) -> Floats | int:
        return self._w(name) if is_there else 0

    def _attention(self, p: str, layer: LayerSpec, h: Floats, kept: Kept, index: int) -> Floats:
        """kept: the keys and values of the layers so far."""
        spec, n = self.spec, len(h)
        own = spec.num_kv_heads, spec.head_dim, spec.num_heads, spec.value_dim or spec.head_dim
        num_kv_heads, head_dim, num_heads, value_dim = layer.heads or own
        if spec.mla is not None:
            return self._latent_attention(p, layer, spec.mla, h)
        reads, tied = layer.reads_layer is not None, layer.values_are_keys
        q, k, v = (
            self.qkv
            if layer.takes_qkv
            else (
                (h @ self._w(p + s).T + (self._w(p + s + "_bias") if spec.qkv_bias else 0)).reshape(n, -1, size)
                for s, size in (
                    ("q", head_dim),
                    ("q" if reads else "k", head_dim),
                    ("q" if reads else "k" if tied else "v", value_dim),
                )
            )
        )
        if spec.joint_qk_norm:
            q, k = (
                _norm(v.reshape(n, -1), self._w(p + s), spec.norm_eps).reshape(v.shape)
                for v, s in ((q, "q_norm"), (k, "k_norm"))
            )
        elif spec.qk_layer_norm is not None:
            q, k = self._centred(q, p + "q_norm"), self._centred(k, p + "k_norm")
        elif spec.qk_norm:
            of_keys = self._w(p + ("q_norm" if reads else "k_norm"))
            q, k = _norm(q, self._w(p + "q_norm"), spec.norm_eps), _norm(k, of_keys, spec.norm_eps)
        v = _norm(v, np.ones(head_dim), spec.norm_eps) if layer.unit_v else v
        if spec.clip_qkv is not None:
            q, k, v = (np.clip(part, -spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        q, k = _rotate(q, layer.rope), _rotate(k, layer.rope)
        if layer.unit_qk_eps is not None:  # as Llama 4 has it, after the rotation
            q, k = (_norm(part, np.ones(head_dim), layer.unit_qk_eps) for part in (q, k))
        k = k * self._w(p + "key_scale")[:, None] if spec.key_scales else k
        if spec.qk_scales:
            q, k = q * self._w(p + "q_norm"), k * self._w(p + "k_norm")
        if (growth := layer.query_growth) is not None:
            q = (
                q
                * (1 + growth.scale * np.log(1 + np.floor((np.arange(n) + growth.offset) / growth.interval)))[
                    :, None, None
                ]
            )
        k, v = kept[layer.reads_layer] if layer.reads_layer is not None else (k, v)
        kept[index] = k, v
        group = num_heads // num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        s = _cap(np.einsum("ihd,jhd->hij", q, k) * spec.query_scale, spec.attn_softcap)
        i, j = np.arange(n)[:, None], np.arange(n)[None, :]
        s = s - np.array(spec.slopes or [0.0])[:, None, None] * (i - j)
        visible = (j <= i) & (j > i - (layer.sliding_window or n + 1))
        if layer.chunked:
            visible &= i // layer.sliding_window == j // layer.sliding_window
        s = np.where(visible, s, -np.inf)
        sinks = self._w(p + "sinks")[:, None, None] if layer.has_sinks else np.full((1, 1, 1), -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), sinks)
        e, sinks = np.exp(s - top), np.exp(sinks - top)
        a = np.einsum("hij,jhd->ihd", e / (e.sum(-1, keepdims=True) + sinks), v).reshape(n, -1)
        if spec.attn_gate:
            gates = np.exp(h @ self._w(p + "attn_gate").T + self._bias(p + "attn_gate_bias", spec.qkv_bias))
            gates = np.log(1 + gates) if spec.softplus_gates else gates / (1 + gates)
            a = a * np.repeat(gates, a.shape[1] // gates.shape[1], axis=1)
        a = self._rounded(_norm(a, self._w(p + "inner_attn_norm"), spec.norm_eps) if spec.inner_norms else a)
        return a @ self._w(p + "o").T + (self._w(p + "o_bias") if spec.o_bias else 0)

    def _centred(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        out = _norm(centred, self._w(name), self.spec.norm_eps)
        return out + self._bias(name + "_bias", bool(self.spec.qk_layer_norm and self.spec.qk_layer_norm.has_bias))

    def _latent_attention(self, p: str, layer: LayerSpec, mla: MlaSpec, h: Floats) -> Floats:
        """With the keys and values of every head, as DeepSeek's report has them (arXiv 2405.04434)."""
        n, heads, r, has_bias = len(h), self.spec.num_heads, mla.rope_dim, self.spec.qkv_bias
        u = of_gates = h
        if mla.q_rank:
            y = h @ self._w(p + "q_a").T + self._bias(p + "q_a_bias", has_bias)
            u = _norm(y, self._w(p + "q_a_norm"), mla.norm_eps)
            of_gates = np.concatenate([u, y], 1) if mla.joins_latents else h
        q = ((of_gates if mla.joins_latents else u) @ self._w(p + "q").T).reshape(n, heads, -1)
        kv = h @ self._w(p + "kv_a").T + self._bias(p + "kv_a_bias", has_bias)
        latent = mla.kv_scale * _norm(kv[:, r:], self._w(p + "kv_a_norm"), mla.norm_eps)
        k, v = ((latent @ self._w(p + name).T).reshape(n, heads, -1) for name in ("k_b", "v_b"))
        rotary = np.repeat(_rotate(kv[:, None, :r], layer.rope), heads, axis=1)
        q, k = np.concatenate([_rotate(q[..., :r], layer.rope), q[..., r:]], -1), np.concatenate([rotary, k], -1)
        s = np.einsum("ihd,jhd->hij", q, k) * self.spec.query_scale
        seen = np.arange(n)[None, :] <= np.arange(n)[:, None]
        if self.spec.indexer is not None:
            if not layer.takes_chosen:
                self.chosen = self._choose(p, layer, self.spec.indexer, h, u)
            seen = seen & self.chosen
        e = np.exp(np.where(seen, s, -np.inf))
        sinks = np.exp(self._w(p + "sinks"))[:, None, None] if layer.has_sinks else 0
        a = np.einsum("hij,jhd->ihd", e / (e.sum(-1, keepdims=True) + sinks), v).reshape(n, -1)
        if self.spec.attn_gate:
            gates = 1 + np.exp(-of_gates @ self._w(p + "attn_gate").T)
            a = (a.reshape(n, heads, -1) / gates.reshape(n, heads, -1)).reshape(n, -1)
        return a @ self._w(p + "o").T + self._bias(p + "o_bias", self.spec.o_bias)

    def _choose(self, p: str, layer: LayerSpec, of: IndexerSpec, h: Floats, u: Floats) -> npt.NDArray[np.bool_]:
        """Query by query, as the report on DeepSeek V3.2 (arXiv 2512.02556) writes the lightning indexer."""
        key = h @ self._w(p + "index_k").T
        key = key - key.mean(-1, keepdims=True)
        key = key / np.sqrt((key**2).mean(-1, keepdims=True) + of.norm_eps) * self._w(p + "index_k_norm")
        key = _rotate((key + self._w(p + "index_k_norm_bias"))[:, None], layer.rope)[:, 0]
        query = _rotate((u @ self._w(p + "index_q").T).reshape(len(h), of.num_heads, of.head_dim), layer.rope)
        weight, chosen = h @ self._w(p + "index_weights").T, np.zeros((len(h), len(h)), np.bool_)
        for t in range(len(h)):
            scores = weight[t] @ np.maximum(query[t] @ key[: t + 1].T, 0)
            chosen[t, sorted(range(t + 1), key=lambda s: (-scores[s], s))[: of.topk]] = True
        return chosen

    def _recurrent(self, p: str, r: RecurrentSpec, h: Floats) -> Floats:
        """Head by head and token by token, as the papers write it: Mamba 2 (arXiv 2405.21060) with x, B, C, dt, A, D,
        and gated delta networks (arXiv 2412.06464) with q, k, v, alpha, beta; alpha has a number for each of a key in
        the report on Kimi Linear (arXiv 2510.26692).
        """
        n, mamba, conv = len(h), r.kind == "mamba2", self._w(p + "conv")

        def into(name: str) -> Floats:
            if r.kind == "gated_delta" and r.rank and name in ("z", "dt"):
                return h @ self._w(f"{p}{name}_low").T @ self._w(p + name).T
            return h @ self._w(p + name).T + self._bias(f"{p}{name}_in_bias", r.in_bias)

        def out_of(y: Floats) -> Floats:
            return y @ self._w(p + "o").T + self._bias(p + "o_bias", r.o_bias)

        of_conv = self._bias(p + "conv_bias", r.conv_bias)
        if r.kind == "short_conv":  # B, C, x of the report on LFM 2
            gated = into("beta") * into("v")
            padded = np.concatenate([np.zeros((r.conv_kernel - 1, gated.shape[1])), gated])
            mixed = sum((conv[:, i] * padded[i : i + n] for i in range(r.conv_kernel)), of_conv)
            return out_of(mixed * into("z"))
        if r.kind == "mamba1":  # x, z, delta, B, C of the paper on Mamba (arXiv 2312.00752), channel by channel
            return out_of(self._selective(p, r, into("v"), conv, of_conv) * _silu(into("z")))
        if r.kind == "rg_lru":  # the paper on Griffin (arXiv 2402.19427), channel by channel
            return out_of(self._gated_linear(p, r, into("v"), conv, of_conv) * _gelu_tanh(into("z")))
        by = dict(zip("vkqzd", r.scales or (1,) * 5, strict=True))
        u = np.concatenate([into(name) * by[name] for name in ("vkq" if mamba else "qkv")], 1)
        mixed = np.zeros_like(u)
        for t in range(n):
            for back in range(min(t + 1, r.conv_kernel)):
                mixed[t] += conv[:, r.conv_kernel - 1 - back] * u[t - back]
        mixed = _silu(mixed + of_conv)
        keys = r.num_key_heads * r.key_dim
        if mamba:
            v, k, q = np.split(mixed, [r.num_values, r.num_values + keys], 1)
        else:
            q, k, v = np.split(mixed, [keys, 2 * keys], 1)
        k, q = k.reshape(n, -1, r.key_dim), q.reshape(n, -1, r.key_dim)
        v, z = v.reshape(n, -1, r.value_dim), (into("z") * by["z"]).reshape(n, -1, r.value_dim)
        steps = (into("dt") * by["d"] + self._w(p + "dt_bias")).reshape(n, r.num_heads, -1)
        dt, rates = np.maximum(np.log1p(np.exp(steps)), r.least_step), np.exp(self._w(p + "a_log"))[:, None]
        alpha = np.exp(r.least_log * (1 + np.tanh(rates * steps / 2)) / 2 if r.least_log else -rates * dt)
        into_gate = (lambda z: 1 / (1 + np.exp(-z))) if r.sigmoid_gate else _silu
        y = np.zeros_like(v)
        for j in range(r.num_heads):
            group = j % r.num_key_heads if r.tiled else j * r.num_key_heads // r.num_heads
            state = np.zeros((r.value_dim, r.key_dim))
            for t in range(n):
                query, key = q[t, group], k[t, group]
                if mamba:
                    state = alpha[t, j] * state + dt[t, j] * np.outer(v[t, j], key)
                    y[t, j] = state @ query + self._w(p + "skip")[j] * v[t, j]
                    continue
                query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(r.key_dim)
                key = key / np.sqrt(key @ key + 1e-6)
                beta = r.write_scale / (1 + np.exp(-into("beta")[t, j]))
                erased = np.eye(r.key_dim) - beta * np.outer(key, key)
                state = (alpha[t, j] * state) @ erased + beta * np.outer(v[t, j], key)
                y[t, j] = state @ query
        if mamba:
            y = y if r.normed == "first" else y * into_gate(z)
            if r.normed != "never":
                parts = 1 if r.joint_norm else r.num_key_heads
                y = y.reshape(n, parts, -1)
                y = _norm(y, self._w(p + "norm").reshape(parts, -1), r.norm_eps or self.spec.norm_eps)
            y = y.reshape(z.shape) * (into_gate(z) if r.normed == "first" else 1)
        else:
            y = _norm(y, self._w(p + "norm"), r.norm_eps or self.spec.norm_eps) * into_gate(z)
        return out_of(y.reshape(n, -1))

    def _selective(self, p: str, r: RecurrentSpec, u: Floats, conv: Floats, of_conv: Floats) -> Floats:
        padded = np.concatenate([np.zeros((r.conv_kernel - 1, u.shape[1])), u])
        x = _silu(sum((conv[:, i] * padded[i : i + len(u)] for i in range(r.conv_kernel)), of_conv))
        low, b, c = (x @ self._w(p + name).T for name in ("dt_low", "k", "q"))
        if r.inner_eps is not None:
            normed = zip((low, b, c), ("dt_norm", "k_norm", "q_norm"), strict=True)
            low, b, c = (_norm(part, self._w(p + name), r.inner_eps) for part, name in normed)
        delta = np.log1p(np.exp(low @ self._w(p + "dt").T + self._w(p + "dt_bias")))
        a, y = -np.exp(self._w(p + "a_log")), np.zeros_like(x)
        for channel in range(r.value_dim):
            state = np.zeros(r.key_dim)
            for t in range(len(x)):
                state = np.exp(delta[t, channel] * a[channel]) * state + delta[t, channel] * x[t, channel] * b[t]
                y[t, channel] = state @ c[t]
        return y + self._w(p + "skip") * x

    def _gated_linear(self, p: str, r: RecurrentSpec, u: Floats, conv: Floats, of_conv: Floats) -> Floats:
        padded = np.concatenate([np.zeros((r.conv_kernel - 1, u.shape[1])), u])
        x = np.asarray(sum((conv[:, i] * padded[i : i + len(u)] for i in range(r.conv_kernel)), of_conv))
        write, forget, lam, y = self._w(p + "write"), self._w(p + "forget"), self._w(p + "a"), np.zeros_like(x)
        for channel in range(r.value_dim):
            first, state = channel // r.rank * r.rank, 0.0
            block = x[:, first : first + r.rank]
            i_t = 1 / (1 + np.exp(-(block @ write[channel] + self._w(p + "write_bias")[channel])))
            r_t = 1 / (1 + np.exp(-(block @ forget[channel] + self._w(p + "forget_bias")[channel])))
            a = (1 / (1 + np.exp(lam[channel]))) ** (8 * r_t)  # as the paper, with a = sigmoid(−lam)
            for t in range(len(x)):
                state = i_t[t] * x[t, channel] * (np.sqrt(1 - a[t] ** 2) if t else 1) + (a[t] * state if t else 0)
                y[t, channel] = state
        return y

    def _mlp(self, p: str, h: Floats, cutoff: float | None = None, limit: float | None = None) -> Floats:
        spec = self.spec
        up = h @ self._w(p + "up").T + (self._w(p + "up_bias") if spec.mlp_bias else 0)
        g = h @ self._w(p + "gate").T + (self._w(p + "gate_bias") if spec.mlp_bias else 0) if spec.gated_mlp else up
        if spec.clamped_gate is not None:
            alpha, limit = spec.clamped_gate.alpha, spec.clamped_gate.limit
            g, up = np.minimum(g, limit), np.clip(up, -limit, limit) + 1
            return (g / (1 + np.exp(-alpha * g)) * up) @ self._w(p + "down").T + self._w(p + "down_bias")
        if limit is not None:
            inner = _silu(np.minimum(g, limit)) * np.clip(up, -limit, limit)
            return inner @ self._w(p + "down").T + (self._w(p + "down_bias") if spec.mlp_bias else 0)
        if cutoff is not None:
            g = np.maximum(g - g.mean(-1, keepdims=True) - cutoff * g.std(-1, keepdims=True), 0)
        g = self._xielu(p, g) if spec.xielu else self._act(g * spec.gate_scale)
        inner = g * up if spec.gated_mlp else g
        inner = _norm(inner, self._w(p + "inner_mlp_norm"), spec.norm_eps) if spec.inner_norms else inner
        return self._rounded(inner) @ self._w(p + "down").T + (self._w(p + "down_bias") if spec.mlp_bias else 0)

    def _rounded(self, x: Floats) -> Floats:
        if not self.spec.rounds_inputs:
            return x
        scales = [127 / max(np.abs(row).max(), 1e-5) for row in x]
        return np.array([np.round(row * scale) / scale for row, scale in zip(x, scales, strict=True)])

    def _router_mlp(self, p: str, of: RouterSpec, h: Floats) -> Floats:
        r = h @ self._w(p + "in").T + self._w(p + "in_bias")
        r = r + self.routed * self._w(p + "carry") if of.carries and self.routed is not None else r
        self.routed, u = r, _norm(r, self._w(p + "norm"), self.spec.norm_eps)
        for name in ("first", "second"):
            u = u @ self._w(p + name).T + self._w(f"{p}{name}_bias")
            u = u * np.array([[(1 + erf(x / 2**0.5)) / 2 for x in row] for row in u])
        return u

    def _xielu(self, p: str, x: Floats) -> Floats:
        """Return xIELU of arXiv 2411.13010, as transformers computes it."""
        alpha_p, alpha_n, beta, eps = (self._w(p + name)[0] for name in ("alpha_p", "alpha_n", "beta", "eps"))
        below = (np.expm1(np.minimum(x, eps)) - x) * (beta + np.log1p(np.exp(alpha_n))) + beta * x
        return np.where(x > 0, np.log1p(np.exp(alpha_p)) * x * x + beta * x, below)

    def _act(self, g: Floats) -> Floats:
        if self.spec.activation == "silu":
            return _silu(g)
        if self.spec.activation == "relu2":
            return np.where(g > 0, g * g, 0)
        return _gelu_tanh(g)

    def _moe(self, p: str, moe: MoeSpec, h: Floats, x: Floats) -> Floats:
        routed, inputs = h, h @ self._w(p + "latent_in").T if moe.latent_size else h
        if moe.own_norms:
            routed = _norm(x, self._w(p + "router_scale"), self.spec.norm_eps) / np.sqrt(x.shape[1])
            inputs = self._residual_norm(x, p + "experts_norm")
        if moe.router is not None:
            routed = self._router_mlp(p + "router_", moe.router, h)
        scores = routed @ self._w(p + "router").T + (self._w(p + "scores_bias") if moe.scores_bias else 0)
        e = np.exp(_cap(scores, moe.softcap))
        probabilities = e / (1 + e) if moe.scoring == "sigmoid" else e / e.sum(-1, keepdims=True)
        bias = self._w(p + "router_bias") if moe.router_bias else 0
        out = np.zeros_like(inputs)
        for t, row in enumerate(probabilities):
            if moe.sparse_mix is not None:
                for weight, expert in _rounds(scores[t], moe.experts_per_token, moe.sparse_mix):
                    out[t] += weight * self._mlp(f"{p}experts.{expert}.", inputs[t : t + 1])[0]
                continue
            order = ((scores[t] if moe.ranks_outputs else row) + bias).reshape(moe.num_groups, -1)
            best = [np.sort(group)[-2:].sum() if moe.router_bias else group.max() for group in order]
            order[np.argsort(best)[: moe.num_groups - moe.groups_per_token]] = 0 if moe.zeroes_groups else -np.inf
            chosen = np.argsort(-order.ravel(), kind="stable")[: moe.experts_per_token]
            share = moe.scale * (row[chosen] / (row[chosen].sum() + moe.sum_eps) if moe.norm_topk else row[chosen])
            share = share * self._w(p + "expert_scales")[chosen] if moe.own_norms else share
            for weight, expert in zip(share, chosen, strict=True):
                if expert >= moe.num_experts + moe.identities:
                    continue
                if expert >= moe.num_experts:
                    out[t] += weight * inputs[t]
                    continue
                before, after = (weight, 1) if moe.scales_inputs else (1, weight)
                own = self._mlp(f"{p}experts.{expert}.", before * inputs[t : t + 1], limit=moe.gate_limit)
                out[t] += after * own[0]
        out = out @ self._w(p + "latent_out").T if moe.latent_size else out
        if moe.shared_intermediate_size:
            gate = 1 / (1 + np.exp(-(h @ self._w(p + "shared_gate").T))) if moe.shared_gate else 1
            shared = gate * self._mlp(p + "shared.", h)
            if moe.own_norms:
                out = self._residual_norm(out, p + "post_experts_norm")
                shared = self._residual_norm(shared, p + "post_shared_norm")
            out = out + shared
        return out


def _rounds(scores: Floats, count: int, mix: float) -> list[tuple[float, int]]:
    """Weights and experts of a token, each the softmax of the largest score among the near ones that are left."""
    left, found = list(range(len(scores))), []
    for _ in range(count):
        best = max(left, key=lambda e: scores[e])
        near = [e for e in left if (scores[best] - scores[e]) / max(abs(scores[e]), scores[best]) <= mix]
        found.append((float(1 / np.exp(scores[near] - scores[best]).sum()), best))
        left.remove(best)
    return found


def _like(y: Floats, x: Floats) -> Floats:
    """y with the magnitude of x."""
    of_y, of_x = (np.sqrt((v * v).mean(-1, keepdims=True)) for v in (y, x))
    return y * of_x / np.maximum(of_y, np.sqrt(1e-5))


def _norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _gelu_tanh(x: Floats) -> Floats:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _cap(x: Floats, cap: float | None) -> Floats:
    return x if cap is None else cap * np.tanh(x / cap)


def _rotate(x: Floats, rope: RopeSpec | None) -> Floats:
    if rope is None:
        return x
    pairs = len(rope.inv_freq)
    angle = np.arange(len(x))[:, None, None] * np.array(rope.inv_freq)
    c, s = np.cos(angle) * rope.scale, np.sin(angle) * rope.scale
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * pairs :]], -1)
