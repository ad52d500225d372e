"""Gemma 2 and 3: sliding and full layers, norms before and after attention and MLP, scaled embeddings, gated GELU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import Family, decoder, head_dim, rope, windows
from foreword.models.spec import DecoderSpec, LayerSpec


def gemma2(config: Config) -> DecoderSpec:
    """Even layers slide, odd layers are full. Soft caps on attention scores and logits."""
    rotary = rope(config)
    layers = tuple(LayerSpec(rotary, window) for window in windows(config, lambda i: i % 2 == 0))
    caps = _caps(config, attn=50.0, final=30.0)
    return decoder(config, "gemma2", layers, **_common(config, largest=46), **caps)


def gemma3(config: Config) -> DecoderSpec:
    """Five sliding layers, then a full one; sliding layers have their own rotary base. Norms on q and k."""
    every = config.size("sliding_window_pattern", 6)
    full, local = rope(config), rope(_local(config), "sliding_attention")
    layers = tuple(
        LayerSpec(full if window is None else local, window)
        for window in windows(config, lambda i: (i + 1) % every != 0)
    )
    return decoder(config, "gemma3", layers, **_common(config, largest=62), **_caps(config), qk_norm=True)


def _local(config: Config) -> Config:
    """The config of the sliding layers: an unscaled rotary embedding with its own base."""
    theta = config.positive("rope_local_base_freq", 10000.0)
    return replace(config, values={**config.values, "rope_theta": theta, "rope_scaling": None})


def _caps(config: Config, **defaults: float) -> dict[str, float | None]:
    """``attn_softcap`` and ``final_softcap``: the config's value, None for null; the default if the key is absent."""
    caps: dict[str, float | None] = {}
    for name in ("attn", "final"):
        key, default = f"{name}_logit_softcapping", defaults.get(name)
        capped = config.values.get(key, default) is not None
        caps[f"{name}_softcap"] = config.positive(key, default) if capped else None
    return caps


def _common(config: Config, largest: int) -> dict[str, Any]:
    """Settings of both. query_scale follows the head size; in the ``largest`` model (layers) hidden size / heads."""
    by_head = config.size("num_hidden_layers") != largest
    default = head_dim(config) if by_head else config.size("hidden_size") / config.size("num_attention_heads")
    return {
        "query_scale": config.positive("query_pre_attn_scalar", float(default)) ** -0.5,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(config.size("hidden_size")),
        "post_norms": True,
        "tie_embeddings": config.get("tie_word_embeddings", bool, True),
    }


_LAYER = "model.layers.{i}."
_NAMES = {
    "post_attn_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "post_mlp_norm": _LAYER + "post_feedforward_layernorm.weight",
}
FAMILIES = {
    "gemma2": Family(gemma2, names=_NAMES, norms_less_one=True, gguf="gemma2"),
    "gemma3_text": Family(gemma3, names=_NAMES, norms_less_one=True, gguf="gemma3"),
}
