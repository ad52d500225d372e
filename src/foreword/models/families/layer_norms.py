"""Nemotron, StableLM and Jais 2: LayerNorm, and a rotary embedding, in the first two of a part of each head."""

from __future__ import annotations

from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    HIDDEN_ACT,
    LAYER_NORM_EPS,
    LAYER_NORMED,
    WITH_BIASES,
    Family,
    decoder,
    num_layers,
    rope,
)
from foreword.models.keys import Key, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec, QKLayerNorm


def nemotron(config: Config) -> DecoderSpec:
    """Return the spec of Nemotron, whose MLP has no gate."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return decoder(config, "nemotron", layers, eps="norm_eps", layer_norm=True, gated_mlp=False)


def stablelm(config: Config) -> DecoderSpec:
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    own: dict[str, Any] = {
        "qkv_bias": config.get("use_qkv_bias", bool),
        "parallel_mlp": config.get("use_parallel_residual", bool),
    }
    if config.get("qk_layernorm", bool):
        own |= {"qk_norm": True, "qk_layer_norm": QKLayerNorm(of_heads=True)}
    return decoder(config, "stablelm", layers, eps="layer_norm_eps", layer_norm=True, **own)


def jais2(config: Config) -> DecoderSpec:
    """Return the spec of Jais 2, whose MLP has no gate, and whose products have biases."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return decoder(config, "jais2", layers, eps="layer_norm_eps", layer_norm=True, gated_mlp=False)


_COMMON = (*(key for key in LAYER_NORMED if key.name != "*.use_parallel_residual"), *(HIDDEN_ACT, PARTIAL_ROTARY))
FAMILIES = {
    "nemotron": Family(
        "Nemotron (Minitron)",
        nemotron,
        table(
            *(_COMMON, WITH_BIASES),
            [Key("norm_eps", 1e-5, gguf="attention.layer_norm_epsilon")],
            [only_in_gguf("use_parallel_residual", False, 0)],
            hidden_act="relu2",
            partial_rotary_factor=0.5,
        ),
        norms_less_one=True,
        gguf="nemotron",
    ),
    "stablelm": Family(
        "StableLM",
        stablelm,
        table(
            _COMMON,
            [Key("use_qkv_bias", False), Key("qk_layernorm", False)],
            [LAYER_NORM_EPS],
            [Key("use_parallel_residual", False, gguf="use_parallel_residual", gguf_default=False)],
            num_key_value_heads=32,
            partial_rotary_factor=0.25,
        ),
        joined={
            f".self_attn.{name}_norm.weight": (f".self_attn.{name}_layernorm.norms.{{row}}.weight",) for name in "qk"
        },
        gguf="stablelm",
    ),
    "jais2": Family(
        "Jais 2",
        jais2,
        table(
            LAYER_NORMED,
            [HIDDEN_ACT, *WITH_BIASES, LAYER_NORM_EPS],
            hidden_act="relu2",
            attention_bias=True,
            mlp_bias=True,
        ),
        gguf="jais2",
    ),
}
