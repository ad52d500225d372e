"""LFM2 and LFM3: short convolutions and attention layers with norms of queries and keys; with or without experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    EXPERTS,
    MAX_WINDOW,
    Family,
    Rows,
    decoder,
    experts,
    num_layers,
    rope,
)
from foreword.models.families.states import mixed_layers, stacked
from foreword.models.keys import Key, only_in_gguf, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.rope import check_bases
from foreword.models.spec import DecoderSpec, LayerSpec


def lfm2(config: Config) -> DecoderSpec:
    """Return a spec whose MLP has two thirds of ``intermediate_size``, rounded up, if ``block_auto_adjust_ff_dim``."""
    inner = config.size("intermediate_size")
    if not config.prefix and config.get("block_auto_adjust_ff_dim", bool):
        inner = int(config.positive("block_ffn_dim_multiplier") * int(2 * inner / 3))
        unit = config.size("block_multiple_of")
        inner = -(-inner // unit) * unit
    return _decoder(config, "lfm2", _layers(config), inner)


def lfm2_moe(config: Config) -> DecoderSpec:
    """Return a spec whose first ``num_dense_layers`` have an MLP. Sigmoid scores plus a bias choose the experts."""
    if not config.prefix and config.value("layer_types") is None:
        raise config.error("layer_types is missing", USE_ITS_CONFIG)
    moe = replace(
        experts(config),
        scoring="sigmoid",
        router_bias=config.get("use_expert_bias", bool),
        scale=config.positive("routed_scaling_factor"),
        sum_eps=1e-6,
    )
    dense = config.get("num_dense_layers", int)
    layers = tuple(replace(layer, moe=moe if i >= dense else None) for i, layer in enumerate(_layers(config)))
    return _decoder(config, "lfm2_moe", layers, config.size("intermediate_size"))


def lfm3(config: Config) -> DecoderSpec:
    """Return a spec whose layers with attention have a window or not, each kind with its rotary embedding."""
    count, kinds = num_layers(config), config.sequence("layer_types")
    if config.value("layer_types") is None:
        kinds = [
            {2: "full_attention", 0: "sliding_attention"}.get(i % 4, "conv") if i else "conv" for i in range(count)
        ]
    _check_kinds(config, kinds, ("conv", *_ROPES))
    if config.value("rope_parameters") is None:
        config = config.with_values({"rope_parameters": _ROPES})
    check_bases(config, set(kinds) & _ROPES.keys())
    window = config.size("sliding_window", most=MAX_WINDOW) if "sliding_attention" in kinds else None
    attention = {
        kind: LayerSpec(rope(config, kind), window if kind == "sliding_attention" else None)
        for kind in set(kinds) & _ROPES.keys()
    }
    mixed = mixed_layers(config, [kind in attention for kind in kinds], _convolution(config), None)
    layers = tuple(attention.get(kind, layer) for kind, layer in zip(kinds, mixed, strict=True))
    has_gates = config.get("use_attention_gate", bool)
    own = {"attn_gate": has_gates, "head_gates": has_gates, "post_norms": config.get("use_sandwich_norm", bool)}
    return _decoder(config, "lfm3", layers, config.size("intermediate_size"), **own)


def _decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...], inner: int, **own: Any) -> DecoderSpec:
    own["qk_norm"] = True
    return decoder(config, architecture, layers, act=None, eps="norm_eps", intermediate_size=inner, **own)


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    """Return the layers, with attention or a convolution: by ``layer_types`` or ``full_attn_idxs``, in a GGUF file by
    the number of key/value heads of each.
    """
    count, types, heads = num_layers(config), config.sequence("layer_types"), config.value("num_key_value_heads")
    listed = config.indices("full_attn_idxs", count)
    if isinstance(heads, list):
        attends = [one != 0 for one in heads]
    elif config.value("layer_types") is not None:
        attends = [one != "conv" for one in types]
        _check_kinds(config, types, ("conv", "full_attention"))
    else:
        attends = [i in listed or config.value("full_attn_idxs") is None for i in range(count)]
    return mixed_layers(config, attends, None if all(attends) else _convolution(config), rope(config))


def _check_kinds(config: Config, given: Sequence[Any], kinds: Sequence[str]) -> None:
    if not all(one in kinds for one in given):
        raise config.error(f"layer_types {given!r:.80} are not of {' and '.join(kinds)}", USE_ITS_CONFIG)


def _convolution(config: Config) -> RecurrentSpec:
    kernel, size = config.size("conv_L_cache", most=1 << 8), config.size("hidden_size")
    has_bias = config.get("conv_bias", bool)
    return RecurrentSpec("short_conv", 1, 1, 0, size, kernel, conv_bias=has_bias, in_bias=has_bias, o_bias=has_bias)


def _fused(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of in_proj, which stacks the numbers that are written, the gate, and the values."""
    return stacked("in_proj", [(name, spec.hidden_size) for name in ("beta", "z", "v")])


_W = {"gate": "w1", "up": "w3", "down": "w2"}
_LAYER, _MLP = "model.layers.{i}.", "model.layers.{i}.feed_forward."
_NAMES = {
    "final_norm": "model.embedding_norm.weight",
    "attn_norm": _LAYER + "operator_norm.weight",
    "mlp_norm": _LAYER + "ffn_norm.weight",
    **{f"{name}_norm": f"{_LAYER}self_attn.{name}_layernorm.weight" for name in "qk"},
    "o": _LAYER + "self_attn.out_proj.weight",
    "in_proj": _LAYER + "conv.in_proj.weight",
    "state.conv": _LAYER + "conv.conv.weight",
    "state.o": _LAYER + "conv.out_proj.weight",
    "in_proj_bias": _LAYER + "conv.in_proj.bias",
    "state.conv_bias": _LAYER + "conv.conv.bias",
    "state.o_bias": _LAYER + "conv.out_proj.bias",
    **{name: f"{_MLP}{part}.weight" for name, part in _W.items()},
}
_NAMES_IN_GGUF = {
    "final_norm": "token_embd_norm.weight",
    "in_proj": "blk.{i}.shortconv.in_proj.weight",
    "state.conv": "blk.{i}.shortconv.conv.weight",
    "state.o": "blk.{i}.shortconv.out_proj.weight",
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""The default rotary parameters of the kinds of layers with attention of LFM3."""
_DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 1e6}
_BOTH = (
    *DECODER,
    Key("norm_eps", 1e-5, gguf="attention.layer_norm_rms_epsilon", gguf_default=1e-5),
    Key("conv_L_cache", 3, gguf="shortconv.l_cache", gguf_default=3),
    *(Key("conv_bias", False), Key("layer_types")),
)
_COMMON = (*_BOTH, Key("num_key_value_heads", 8, gguf="attention.head_count_kv", kind=object), Key("full_attn_idxs"))
_LFM2 = (Key("block_auto_adjust_ff_dim", True), *(Key("block_ffn_dim_multiplier", 1.0), Key("block_multiple_of", 256)))
_MOE = (
    *EXPERTS,
    Key("norm_topk_prob", True, gguf="expert_weights_norm", gguf_default=True),
    Key("num_dense_layers", 2, gguf="leading_dense_block_count", gguf_default=0),
    Key("use_expert_bias", True),
    Key("routed_scaling_factor", 1.0),
    only_in_gguf("expert_gating_func", 2),
)
_TIED = {"tie_embedding": "tie_word_embeddings"}
FAMILIES = {
    "lfm2": Family(
        "LFM2: short convolutions and attention layers",
        lfm2,
        table(_COMMON, _LFM2, **_DEFAULTS),
        aliases={"block_ff_dim": "intermediate_size", **_TIED},
        names=_NAMES,
        fused=_fused,
        gguf="lfm2",
        gguf_names=_NAMES_IN_GGUF,
    ),
    "lfm2_moe": Family(
        "LFM2 with experts",
        lfm2_moe,
        table(_COMMON, _MOE, num_experts_per_tok=4, moe_intermediate_size=1792, num_experts=32, **_DEFAULTS),
        aliases=_TIED,
        names={
            **_NAMES,
            "router": _MLP + "gate.weight",
            "router_bias": _MLP + "expert_bias",
            **{f"experts.{name}": f"{_MLP}experts.{{e}}.{w}.weight" for name, w in _W.items()},
        },
        renamed={f".feed_forward.{own}_proj.": f".feed_forward.{w}." for own, w in _W.items()},
        fused=_fused,
        gguf="lfm2moe",
        gguf_names=_NAMES_IN_GGUF,
    ),
    "lfm3": Family(
        "LFM3: short convolutions, and layers with and without a window",
        lfm3,
        table(
            *(_BOTH, ATTENTION_BIAS, [Key("sliding_window", 256)]),
            [Key("use_sandwich_norm", True), Key("use_attention_gate", True)],
            conv_L_cache=7,
            head_dim=128,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        aliases={"rms_norm_eps": "norm_eps"},
        names={
            **_NAMES,
            **{name: f"{_LAYER}self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
            "o": _LAYER + "self_attn.o_proj.weight",
            "attn_gate": _LAYER + "self_attn.gate_proj.weight",
            "post_attn_norm": _LAYER + "post_operator_norm.weight",
            "post_mlp_norm": _LAYER + "post_ffn_norm.weight",
        },
        renamed={".self_attn.g_proj.": ".self_attn.gate_proj."},
        constants={"attn_gate_bias": 0.0},
        fused=_fused,
    ),
}
