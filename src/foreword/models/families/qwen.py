"""Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k), dense and with experts, also of models of images."""

from __future__ import annotations

import re
from collections.abc import Mapping

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    CAUSAL_OR_NOT,
    DECODER,
    EXPERTS,
    HIDDEN_ACT,
    NORMED_EXPERTS,
    NUM_FEATURES,
    SHARED_EXPERT,
    SPARSE_LAYERS,
    WINDOWS,
    Family,
    decoder,
    rope,
    same_window,
    sparse_layers,
    windows,
)
from foreword.models.keys import Key, only, table
from foreword.models.rope import ROTARY_SECTIONS, with_sections
from foreword.models.spec import DecoderSpec, LayerSpec


def _layers(config: Config, *, interleaved: bool = False) -> tuple[LayerSpec, ...]:
    """Return the layers: those from ``max_window_layers`` on have a window if ``use_sliding_window``.

    interleaved: the order of the components of rotary positions, see `with_sections`.
    """
    rotary, first = rope(with_sections(config, interleaved=interleaved)), config.get("max_window_layers", int)
    slides = config.get("use_sliding_window", bool)
    return tuple(LayerSpec(rotary, window) for window in windows(config, lambda i: slides and i >= first))


_CLASS = re.compile(r"(?:.+--)?([^.]+\.[^.]+)")
"""A class of the code of a model: its module and its name, behind the repository of another model if it is of that."""
_OTHER, _SEES_ALL = "modeling.Other", "modeling_qwen.Qwen2Model"
"""Any other class, and that of gte-Qwen2, whose tokens see later ones. Some of its configurations do not say so."""


def qwen2(config: Config) -> DecoderSpec:
    """Return the spec. Raise ModelError for an ``auto_map`` whose AutoModel does not name a module and a class."""
    classes = config.value("auto_map")
    own = classes.get("AutoModel", _OTHER) if isinstance(classes, Mapping) else _OTHER
    match = _CLASS.fullmatch(own) if isinstance(own, str) else None
    if match is None:
        raise config.error(f"AutoModel of auto_map is {own!r:.80}, not a text such as 'modeling.Class'", USE_ITS_CONFIG)
    if match[1] == _SEES_ALL and config.values.get("is_causal") is None:
        config = config.with_values({"is_causal": False})
    return decoder(config, "qwen2", _layers(config), qkv_bias=True)


def qwen2_moe(config: Config) -> DecoderSpec:
    """Return a spec in which every second layer below ``max_window_layers`` may have a window."""
    rotary, end = rope(config), config.get("max_window_layers", int)
    slides = config.get("use_sliding_window", bool)
    spans = windows(config, lambda i: slides and i % 2 == 0 and i < end)
    sparse = sparse_layers(config, shared=True)
    layers = tuple(LayerSpec(rotary, window, moe) for window, moe in zip(spans, sparse, strict=True))
    return decoder(config, "qwen2_moe", layers, qkv_bias=config.get("qkv_bias", bool))


def qwen3(config: Config) -> DecoderSpec:
    return decoder(config, "qwen3", _layers(config, interleaved=True), qk_norm=True)


def qwen3_moe(config: Config) -> DecoderSpec:
    """Return a spec in which all layers have a window, or none."""
    rotary = rope(with_sections(config, interleaved=True))
    window = same_window(config, slides=config.get("use_sliding_window", bool))
    layers = tuple(LayerSpec(rotary, window, moe) for moe in sparse_layers(config))
    return decoder(config, "qwen3_moe", layers, qk_norm=True)


_QWEN2 = (*DECODER, CAUSAL_OR_NOT, HIDDEN_ACT, *WINDOWS, Key("use_sliding_window", False), Key("max_window_layers", 28))
_QWEN3, _SPARSE = (*_QWEN2, *ATTENTION_BIAS, ROTARY_SECTIONS, NUM_FEATURES), (*EXPERTS, *SPARSE_LAYERS)
FAMILIES = {
    "qwen2": Family(
        "Qwen2",
        qwen2,
        table(_QWEN2, [ROTARY_SECTIONS, Key("auto_map", kind=dict)]),
        gguf="qwen2",
        more_gguf=("qwen2vl",),
    ),
    "qwen2_moe": Family(
        "Qwen2 with experts",
        qwen2_moe,
        table(
            *(_QWEN2, _SPARSE, [SHARED_EXPERT, Key("qkv_bias", True)]),
            [Key("norm_topk_prob", False, gguf="expert_weights_norm", gguf_default=False)],
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
        ),
        gguf="qwen2moe",
    ),
    "qwen3": Family("Qwen3", qwen3, table(_QWEN3, head_dim=128), gguf="qwen3", more_gguf=("qwen3vl",)),
    "qwen3_moe": Family(
        "Qwen3 with experts",
        qwen3_moe,
        table(
            _QWEN3,
            _SPARSE,
            num_key_value_heads=4,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=False,
        ),
        gguf="qwen3moe",
    ),
    "qwen3_vl_moe_text": Family(
        "Qwen3-VL with experts, its decoder",
        qwen3_moe,
        table(
            *(_QWEN3, NORMED_EXPERTS, SPARSE_LAYERS, [only("use_sliding_window", False)]),
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            tie_word_embeddings=True,
            rope_theta=5e5,
        ),
        gguf="qwen3vlmoe",
        transposed_experts=None,
    ),
}
