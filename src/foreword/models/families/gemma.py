"""Gemma 2 and 3: sliding and full layers, norms before and after each half, scaled embeddings, a gated GELU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import Family, decoder, head_dim, rope, windows
from foreword.models.spec import DecoderSpec, LayerSpec


def gemma2(config: Config) -> DecoderSpec:
    """Every other layer slides, the first included. Softcaps on attention and on the logits."""
    rotary = rope(config)
    layers = tuple(LayerSpec(rotary, window) for window in windows(config, lambda i: i % 2 == 0))
    return decoder(config, "gemma2", layers, **_common(config, largest=46),
                   attn_softcap=_cap(config, "attn_logit_softcapping", 50.0),
                   final_softcap=_cap(config, "final_logit_softcapping", 30.0))  # fmt: skip


def gemma3(config: Config) -> DecoderSpec:
    """Five layers slide, the sixth is full; sliding layers have a rotary base of their own. q and k have norms."""
    every = config.size("sliding_window_pattern", 6)
    full, local = rope(config), rope(_local(config), "sliding_attention")
    layers = tuple(
        LayerSpec(full if window is None else local, window)
        for window in windows(config, lambda i: (i + 1) % every != 0)
    )
    return decoder(config, "gemma3", layers, **_common(config, largest=62), qk_norm=True,
                   attn_softcap=_cap(config, "attn_logit_softcapping"),
                   final_softcap=_cap(config, "final_logit_softcapping"))  # fmt: skip


def _local(config: Config) -> Config:
    """The config as sliding layers see it: an unscaled rotary embedding with its own base."""
    theta = config.positive("rope_local_base_freq", 10000.0)
    return replace(config, values={**config.values, "rope_theta": theta, "rope_scaling": None})


def _cap(config: Config, key: str, default: float | None = None) -> float | None:
    """The cap, or None if the config says null; the family's default if it says nothing."""
    return config.positive(key, default) if config.values.get(key, default) is not None else None


def _common(config: Config, largest: int) -> dict[str, Any]:
    """What both share. Queries are scaled by the head size, in the largest model of each by hidden size over heads."""
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
