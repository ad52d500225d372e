"""Gated delta-net and attention layers: Qwen3-Next and Qwen3.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    EXPERTS,
    NEXT_TOKEN_HEADS,
    NORMED_EXPERTS,
    SHARED_EXPERT,
    SPARSE_LAYERS,
    Family,
    Rows,
    by_head,
    decoder,
    experts,
    layers_of,
    num_layers,
    rope,
    sparse_layers,
)
from foreword.models.families.states import STATE_NAMES_IN_GGUF, mixed_layers, recurrent_of, stacked, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.rope import PARTIAL_ROTARY, ROTARY_SECTIONS, with_sections
from foreword.models.spec import DecoderSpec, LayerSpec


def qwen3_next(config: Config) -> DecoderSpec:
    """Every fourth layer has attention with an output gate, which rotates a quarter of each head; the others are gated
    delta-nets. The experts are those of Qwen2-MoE.
    """
    layers = _layers(config, _delta_net(config))
    sparse = sparse_layers(config, experts(config, shared=True))
    layers = tuple(replace(layer, moe=moe) for layer, moe in zip(layers, sparse, strict=True))
    return decoder(config, "qwen3_next", layers, qk_norm=True, attn_gate=True)


def qwen3_5(config: Config) -> DecoderSpec:
    """Return the spec of Qwen3.5: Qwen3-Next with an MLP in every layer."""
    return _qwen3_5(config, "qwen3_5")


def qwen3_5_moe(config: Config) -> DecoderSpec:
    """Return the spec of Qwen3.5 with experts in every layer."""
    moe = experts(config, shared=True)
    # No layer has a dense MLP.
    inner = config.size("intermediate_size", moe.intermediate_size)
    spec = _qwen3_5(config, "qwen3_5_moe", intermediate_size=inner)
    return replace(spec, layers=tuple(replace(layer, moe=moe) for layer in spec.layers))


def _qwen3_5(config: Config, architecture: str, **differences: Any) -> DecoderSpec:
    """Return a spec. Value heads are ordered by their number within a key head in GGUF files."""
    recurrent = replace(_delta_net(config), tiled=bool(config.prefix))
    config = with_sections(config, interleaved=True)
    layers = _layers(config, recurrent)
    return decoder(config, architecture, layers, qk_norm=True, attn_gate=True, **differences)


def _delta_net(config: Config) -> RecurrentSpec:
    heads = config.size("linear_num_value_heads")
    value_dim = config.size("linear_num_values", 128 * heads) // heads  # a key of GGUF files
    return RecurrentSpec(
        "gated_delta",
        num_heads=heads,
        num_key_heads=config.size("linear_num_key_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim", value_dim),
        conv_kernel=config.size("linear_conv_kernel_dim", most=1 << 8),
    )


def _layers(config: Config, recurrent: RecurrentSpec) -> tuple[LayerSpec, ...]:
    every, listed = config.size("full_attention_interval"), config.sequence(_RECURRENT)
    if listed and (len(listed) < num_layers(config) or not all(type(one) in (bool, int) for one in listed)):
        raise config.error(f"{_RECURRENT} {listed!r:.80} does not say of each layer whether it is", USE_ITS_CONFIG)
    linear = layers_of(config, "linear_attention", lambda i: bool(listed[i]) if listed else (i + 1) % every > 0)
    return mixed_layers(config, [not one for one in linear], recurrent if any(linear) else None, rope(config))


def _fused_qwen3_next(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of in_proj_qkvz, which stacks q, k, v, z by key head, and of in_proj_ba with beta, dt."""
    if (recurrent := recurrent_of(spec)) is None:
        return _fused_gate(spec)
    per_key = recurrent.num_heads // recurrent.num_key_heads
    values = per_key * recurrent.value_dim
    qkvz = [("q", recurrent.key_dim), ("k", recurrent.key_dim), ("v", values), ("z", values)]
    return {
        **stacked("in_proj_qkvz", qkvz, repeats=True),
        **stacked("in_proj_ba", [("beta", per_key), ("dt", per_key)], repeats=True),
        **_fused_gate(spec),
    }


def _fused_gate(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of q_proj, which stacks q and the gate by head."""
    return by_head(("q", spec.head_dim), ("attn_gate", spec.head_dim), source="q_proj")


def _qwen3_next_in_gguf(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of attn_qkv, which stacks q, k and v of the whole layer; the others are as in a directory."""
    own = _fused_qwen3_next(spec)
    return {**{name: rows for name, rows in own.items() if rows.name != "in_proj_qkvz"}, **_fused_qkv(spec, "qkv")}


def _fused_qkv(spec: DecoderSpec, source: str) -> Mapping[str, Rows]:
    """Return the rows of q, k and v of the whole layer."""
    recurrent = recurrent_of(spec)
    return {} if recurrent is None else stacked(source, list(recurrent.parts))


def _fused_qwen3_5(spec: DecoderSpec) -> Mapping[str, Rows]:
    return {**_fused_qkv(spec, "in_proj_qkv"), **_fused_gate(spec)}


def _qwen3_5_in_gguf(spec: DecoderSpec) -> Mapping[str, Rows]:
    return {**_fused_qkv(spec, "qkv"), **_fused_gate(spec)}


_RECURRENT = "*.attention.recurrent_layers"
# The activation is that of the recurrent layers, too.
_COMMON = (
    *(*DECODER, *ATTENTION_BIAS, *NEXT_TOKEN_HEADS, PARTIAL_ROTARY, only("hidden_act", "silu", "swish")),
    *(Key("layer_types"), Key(_RECURRENT, gguf=_RECURRENT.removeprefix("*."), kind=list)),
    Key("full_attention_interval", 4, gguf="full_attention_interval", gguf_default=4),
    Key("linear_num_value_heads", 32, gguf="ssm.time_step_rank"),
    Key("linear_num_key_heads", 16, gguf="ssm.group_count"),
    Key("linear_key_head_dim", 128, gguf="ssm.state_size"),
    Key("linear_value_head_dim"),
    Key("linear_num_values", gguf="ssm.inner_size"),
    Key("linear_conv_kernel_dim", 4, gguf="ssm.conv_kernel"),
)
_QWEN3_5 = (*_COMMON, ROTARY_SECTIONS)
_LAYER = "model.layers.{i}.linear_attn."
_NAMES = {
    **state_names("linear_attn"),
    "q_proj": "model.layers.{i}.self_attn.q_proj.weight",
    "q_proj_bias": "model.layers.{i}.self_attn.q_proj.bias",
}
_QWEN3_5_NAMES = {
    **_NAMES,
    "state.z": _LAYER + "in_proj_z.weight",
    "state.beta": _LAYER + "in_proj_b.weight",
    "state.dt": _LAYER + "in_proj_a.weight",
}
_IN_GGUF = {
    **STATE_NAMES_IN_GGUF,
    "q_proj": "blk.{i}.attn_q.weight",
    "q_proj_bias": "blk.{i}.attn_q.bias",
    "mlp_norm": "blk.{i}.post_attention_norm.weight",
    "in_proj_ba": "blk.{i}.ssm_ba.weight",
    "state.z": "blk.{i}.attn_gate.weight",
}
_QWEN3_5_IN_GGUF = {**_IN_GGUF, "state.beta": "blk.{i}.ssm_beta.weight", "state.dt": "blk.{i}.ssm_alpha.weight"}
_UNUSED = ("score.", "mtp.")
FAMILIES = {
    "qwen3_next": Family(
        "Qwen3-Next: gated delta-net and attention layers",
        qwen3_next,
        table(
            *(_COMMON, EXPERTS, SPARSE_LAYERS, [SHARED_EXPERT]),
            num_key_value_heads=2,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            head_dim=256,
            partial_rotary_factor=0.25,
        ),
        names=_NAMES,
        unused=_UNUSED,
        norms_less_one=True,
        gguf="qwen3next",
        gguf_names=_IN_GGUF,
        fused=_fused_qwen3_next,
        gguf_fused=_qwen3_next_in_gguf,
    ),
    "qwen3_5_text": Family(
        "Qwen3.5: gated delta-net and attention layers",
        qwen3_5,
        table(_QWEN3_5, num_key_value_heads=4, head_dim=256, partial_rotary_factor=0.25),
        names=_QWEN3_5_NAMES,
        unused=_UNUSED,
        norms_less_one=True,
        gguf="qwen35",
        gguf_names=_QWEN3_5_IN_GGUF,
        fused=_fused_qwen3_5,
        gguf_fused=_qwen3_5_in_gguf,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5 with experts",
        qwen3_5_moe,
        table(
            *(_QWEN3_5, NORMED_EXPERTS, [SHARED_EXPERT]),
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            head_dim=256,
            partial_rotary_factor=0.25,
        ),
        names=_QWEN3_5_NAMES,
        unused=_UNUSED,
        norms_less_one=True,
        gguf="qwen35moe",
        gguf_names=_QWEN3_5_IN_GGUF,
        fused=_fused_qwen3_5,
        gguf_fused=_qwen3_5_in_gguf,
    ),
}
