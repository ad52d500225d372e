"""ZAYA: attention whose queries and keys pass convolutions, and a router that is carried from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    MAX_WINDOW,
    Family,
    decoder,
    head_dim,
    in_parts,
    kv_heads,
    layers_of,
    module_names,
    rope,
)
from foreword.models.families.routed import with_ropes
from foreword.models.families.states import check_state
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec, in_bias_of
from foreword.models.rope import PARTIAL_ROTARY, check_bases
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec, RouterSpec


def zaya(config: Config) -> DecoderSpec:
    """Return a spec with two layers for each layer of a file: one that makes queries, keys and values, and attention
    with the experts. The last choice of a router skips the experts.
    """
    if config.value("partial_rotary_factor") != 1.0:  # each kind of layers has its own
        raise config.refused("partial_rotary_factor", config.value("partial_rotary_factor"))
    slides = layers_of(config, _SLIDING, lambda i: False, other=_FULL)
    kinds = [_SLIDING if slide else _FULL for slide in slides]
    config = with_ropes(_without_type(config), _ROPES)
    check_bases(config, set(kinds))
    window = config.size("sliding_window", most=MAX_WINDOW) if any(slides) else None
    heads, dim = config.size("num_attention_heads"), head_dim(config)
    moe = MoeSpec(
        num_experts=config.size("num_experts", most=1 << 16),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        norm_topk=False,
        router_bias=True,
        empties=1,
    )
    has_bias, size = config.get("attention_bias", bool), config.size("router_hidden_size")
    mixed = _mixed(config, kv_heads(config, heads), dim, in_bias=has_bias)
    attention = {
        kind: LayerSpec(
            rope(config, kind),
            window if kind == _SLIDING else None,
            beside=True,
            takes_qkv=True,
            unit_qk_eps=float(np.finfo(np.float32).eps) ** 2 / dim,
        )
        for kind in set(kinds)
    }
    layers: list[LayerSpec] = []
    for i, kind in enumerate(kinds):
        own = replace(moe, router=RouterSpec(size, carries=i > 0))
        layers += [LayerSpec(None, recurrent=mixed, has_mlp=False), replace(attention[kind], moe=own)]
    return decoder(
        config,
        "zaya",
        tuple(layers),
        intermediate_size=moe.intermediate_size,
        key_scales=True,
        scaled_sums=True,
        qkv_bias=False,
        logits_bias=config.get("lm_head_bias", bool),
    )


def _without_type(config: Config) -> Config:
    """Return the config without a ``rope_type`` of all layers in its rotary parameters, which published ones have
    beside those of each kind, and which the reference leaves out.
    """
    given = config.value("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    return config.with_values({"rope_parameters": {key: of for key, of in given.items() if key != "rope_type"}})


def _mixed(config: Config, num_key_heads: int, dim: int, *, in_bias: bool) -> RecurrentSpec:
    kernel, heads_kernel = (config.size(key, most=1 << 8) for key in ("cca_time0", "cca_time1"))
    if kernel == heads_kernel == 1:
        raise config.error("cca_time0 = cca_time1 = 1 is not supported", "Use a model whose convolutions are longer")
    if num_key_heads * dim % 2:
        raise config.error(f"{num_key_heads * dim} values are not two halves", USE_ITS_CONFIG)
    heads = config.size("num_attention_heads")
    mixed = RecurrentSpec(
        "mixed_qkv", heads, num_key_heads, 0, dim, kernel, conv_bias=True, in_bias=in_bias, heads_kernel=heads_kernel
    )
    check_state(config, mixed)
    return mixed


_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_ROPES = {
    _FULL: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
"""The default rotary parameters of the kinds of layers."""
_LAYER = "model.layers.{i}."
_QKV, _ROUTER = _LAYER + "self_attn.qkv_proj.", _LAYER + "mlp.gate."
_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj_current", "late_v": "v_proj_delayed"}
_CONVOLUTIONS = {"state.conv": "conv_qk_depthwise", "state.heads_conv": "conv_qk_grouped"}
_SUM = {
    "sum_bias": "hidden_states_bias",
    "sum_scale": "hidden_states_scale",
    "kept_bias": "residual_bias",
    "kept_scale": "residual_scale",
}
FAMILIES = {
    "zaya": Family(
        "ZAYA: convolutions inside attention",
        zaya,
        table(
            (*(key for key in DECODER if key.name != "intermediate_size"), *ATTENTION_BIAS, HIDDEN_ACT, PARTIAL_ROTARY),
            [Key("sliding_window", kind=int), Key("layer_types"), Key("lm_head_bias", False)],
            [Key("num_experts", 16), only("num_experts_per_tok", 1), Key("moe_intermediate_size", 2048)],
            [Key("router_hidden_size", 256), Key("cca_time0", 2), Key("cca_time1", 2)],
            head_dim=128,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        ),
        names={
            "embed_bias": "model.input_hidden_states_bias",
            "embed_scale": "model.input_hidden_states_scale",
            "logits_bias": "lm_head.bias",
            **{f"state.{name}": f"{_QKV}{module}.weight" for name, module in _PROJECTIONS.items()},
            **{f"state.{in_bias_of(name)}": f"{_QKV}{module}.bias" for name, module in _PROJECTIONS.items()},
            **module_names(_QKV, _CONVOLUTIONS),
            "key_scale": _LAYER + "self_attn.qk_norm.temp",
            **{f"attn_{name}": f"{_LAYER}post_attention_residual_scale.{own}" for name, own in _SUM.items()},
            **{f"mlp_{name}": f"{_LAYER}post_mlp_residual_scale.{own}" for name, own in _SUM.items()},
            **module_names(_ROUTER, {"router_in": "down_proj"}),
            **module_names(_ROUTER + "router_mlp.", {"router_first": "fc1", "router_second": "fc2"}),
            "router": _ROUTER + "router_mlp.out_proj.weight",
            "router_norm": _ROUTER + "router_mlp.norm.weight",
            "router_carry": _ROUTER + "router_states_scale",
            "router_bias": _ROUTER + "balancing_biases",
        },
        numbers=in_parts(2),
    )
}
