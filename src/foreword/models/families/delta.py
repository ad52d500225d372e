"""Gated delta-net and attention layers: Qwen3-Next and Qwen3.5, dense and with experts, and OLMo Hybrid."""

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
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.rope import PARTIAL_ROTARY, ROTARY_SECTIONS, rope_parameters, with_sections
from foreword.models.spec import DecoderSpec, LayerSpec, NormPlaces


def qwen3_next(config: Config) -> DecoderSpec:
    """Every fourth layer has attention with an output gate, which rotates a quarter of each head; the others are gated
    delta-nets. The experts are those of Qwen2-MoE.
    """
    layers = _layers(config, _delta_net(config))
    sparse = sparse_layers(config, shared=True)
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


def olmo_hybrid(config: Config) -> DecoderSpec:
    """Return the spec of OLMo Hybrid: norms before mixer and MLP in layers with a delta-net, after them, as those of
    OLMo 2, in layers with attention. What a delta-net writes may have twice the factor of others.
    """
    count, heads = num_layers(config), config.size("num_attention_heads")
    key_heads = config.size("linear_num_key_heads", heads)
    key_dim = config.size("linear_key_head_dim", max(1, int(0.75 * config.size("hidden_size") / key_heads)))
    recurrent = RecurrentSpec(
        "gated_delta",
        num_heads=config.size("linear_num_value_heads", heads),
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=config.size("linear_value_head_dim", 2 * key_dim),
        conv_kernel=config.size("linear_conv_kernel_dim", most=1 << 8),
        write_scale=2.0 if config.get("linear_allow_neg_eigval", bool) else 1.0,
        norm_eps=1e-5,
    )
    linear = layers_of(config, "linear_attention", lambda i: i % 4 != 3 and (count > 3 or i < count - 1))
    rotary = None
    if _has_base(config):
        rotary = rope(config)
    else:
        config = config.with_values({"rope_theta": 1.0})
        rope_parameters(config)  # which raises for other values than parameters
        config = config.with_values({"rope_parameters": None, "rope_scaling": None})
    layers = mixed_layers(config, [not one for one in linear], recurrent, rotary)
    before, after = NormPlaces(True, False, True, False), NormPlaces(False, True, False, True)
    layers = tuple(replace(layer, norms=after if layer.has_attention else before) for layer in layers)
    return decoder(config, "olmo_hybrid", layers, qk_norm=True, joint_qk_norm=True)


def _has_base(config: Config) -> bool:
    """Return whether a config's rotary embedding has a base, which is null where no layer rotates."""
    own = config.value("rope_parameters") or config.value("rope_scaling") or {}
    values = own if isinstance(own, Mapping) and "rope_theta" in own else config.values
    return "rope_theta" not in values or values["rope_theta"] is not None


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
    *(Key("layer_types"), of_gguf(_RECURRENT, kind=list)),
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
_OLMO_NAMES = {
    **_NAMES,
    **{
        f"state.{own}": f"{_LAYER}{name}_proj.weight"
        for own, name in zip(("q", "k", "v", "o", "z"), "qkvog", strict=True)
    },
    "state.dt": _LAYER + "a_proj.weight",
    "state.beta": _LAYER + "b_proj.weight",
    "state.norm": _LAYER + "o_norm.weight",
    "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
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
        gguf_tiled=True,
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
        gguf_tiled=True,
        fused=_fused_qwen3_5,
        gguf_fused=_qwen3_5_in_gguf,
    ),
    "olmo_hybrid": Family(
        "OLMo Hybrid: gated delta-net and attention layers",
        olmo_hybrid,
        table(
            (*DECODER, *ATTENTION_BIAS, only("hidden_act", "silu", "swish"), Key("layer_types")),
            (Key(f"linear_{name}", kind=int) for name in ("num_key_heads", "num_value_heads")),
            (Key(f"linear_{name}_head_dim", kind=int) for name in ("key", "value")),
            [Key("linear_conv_kernel_dim", 4), Key("linear_allow_neg_eigval", True)],
        ),
        names=_OLMO_NAMES,
        renamed={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        joined={".linear_attn.conv1d.weight": tuple(f".linear_attn.{name}_conv1d.weight" for name in "qkv")},
    ),
}
