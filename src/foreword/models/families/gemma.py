"""Gemma 1 to 3: scaled embeddings, gated GELU. Gemma 2 and 3: sliding and full layers, norms before and after attention
and MLP.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    DECODER,
    WINDOWS,
    Family,
    decoder,
    head_dim,
    num_layers,
    rope,
    windows,
)
from foreword.models.keys import Key, of_gguf, only, only_in_gguf, table
from foreword.models.pooling import GGUF_DENSE
from foreword.models.spec import DecoderSpec, LayerSpec


def gemma(config: Config) -> DecoderSpec:
    """Return the spec of Gemma 1, which has norms before attention and MLP only, as Llama has."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    scale = math.sqrt(config.size("hidden_size"))
    return decoder(config, "gemma", layers, act=None, activation="gelu_tanh", embedding_scale=scale)


def gemma2(config: Config) -> DecoderSpec:
    """Return a spec in which even layers have a sliding window, and attention scores and logits have soft caps."""
    rotary = rope(config)
    layers = tuple(LayerSpec(rotary, window) for window in windows(config, lambda i: i % 2 == 0))
    return decoder(
        config, "gemma2", layers, **_common(config, largest=46), attn_softcap=cap(config, "attn_logit_softcapping")
    )


def vaultgemma(config: Config) -> DecoderSpec:
    """Return the spec of VaultGemma, which is a Gemma 2 without norms after attention and MLP."""
    return replace(gemma2(config), architecture="vaultgemma", post_norms=False)


_EMBEDDING = "gemma-embedding"
"""The architecture of GGUF files of EmbeddingGemma: a Gemma 3 whose tokens see later ones."""


def gemma3(config: Config) -> DecoderSpec:
    """Return a spec of five layers with a sliding window for each one without; those have their own rotary base."""
    is_public = config.value("sliding_window_pattern") is not None
    every = config.size("sliding_window_pattern" if is_public else "_sliding_window_pattern")
    full, local = rope(config, "full_attention"), rope(_local(config), "sliding_attention")
    is_causal = not config.get("use_bidirectional_attention", bool) and config.prefix != f"{_EMBEDDING}."

    def own(window: int) -> int:
        return window if is_causal else window // 2 + 1  # to each side

    layers = tuple(
        LayerSpec(full if window is None else local, window and own(window))
        for window in windows(config, lambda i: (i + 1) % every != 0)
    )
    return decoder(config, "gemma3", layers, **_common(config, largest=62), qk_norm=True, is_causal=is_causal)


def _local(config: Config) -> Config:
    """Return the config of the sliding layers: an unscaled rotary embedding with its own base."""
    theta = config.positive("rope_local_base_freq")
    return config.with_values({"rope_theta": theta, "rope_scaling": None})


def _common(config: Config, largest: int) -> dict[str, Any]:
    """Return settings of both. In GGUF files queries scale by the head size, in ``largest`` by hidden size / heads."""
    scalar = 256.0
    if config.prefix:
        by_head = num_layers(config) != largest
        scalar = head_dim(config) if by_head else config.size("hidden_size") / config.size("num_attention_heads")
    return {
        "query_scale": config.positive("query_pre_attn_scalar", float(scalar)) ** -0.5,
        "act": "hidden_activation",
        "embedding_scale": math.sqrt(config.size("hidden_size")),
        "post_norms": True,
        "final_softcap": cap(config, "final_logit_softcapping"),
    }


def cap(config: Config, key: str) -> float | None:
    """Return the limit of a softcap; None without one."""
    return None if config.value(key) is None else config.positive(key)


_LAYER = "model.layers.{i}."
NORM_NAMES = {
    "post_attn_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "post_mlp_norm": _LAYER + "post_feedforward_layernorm.weight",
}
"""The norms after attention, and before and after the MLP, from Gemma 2 on."""


def _cap_key(name: str, default: float | None = None) -> Key:
    return Key(name, default, gguf=name, gguf_default=default)


_COMMON = (
    *(*DECODER, *ATTENTION_BIAS, *WINDOWS),
    Key("hidden_activation", "gelu_pytorch_tanh", tuple(ACTIVATIONS)),
    Key("query_pre_attn_scalar"),
)
_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_WINDOW, _LOCAL_THETA = "attention.sliding_window", "rope.freq_base_swa"
_GEMMA2 = table(
    _COMMON,
    [
        only("use_bidirectional_attention", False),
        *(_cap_key("attn_logit_softcapping", 50.0), _cap_key("final_logit_softcapping", 30.0)),
        Key("sliding_window", gguf=_WINDOW, gguf_default=4096),
        only_in_gguf(f"{_WINDOW}_pattern", 2),
        only_in_gguf(_LOCAL_THETA, None),
    ],
    **_DEFAULTS,
)
_GEMMA3_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131072,
}  # that configurations of images and texts leave out  # fmt: skip
_GEMMA3 = table(
    _COMMON,
    [
        Key("use_bidirectional_attention", False, (True, False)),
        only("attn_logit_softcapping", None, gguf="attn_logit_softcapping"),
        _cap_key("final_logit_softcapping"),
        Key("sliding_window_pattern", gguf=f"{_WINDOW}_pattern"),
        Key("_sliding_window_pattern", 6),
        Key("rope_local_base_freq", 10000.0, gguf=_LOCAL_THETA, gguf_default=10000.0),
    ],
    (of_gguf(f"*.{name}_feat_{side}", kind=int) for name in GGUF_DENSE for side in ("in", "out")),
    rope_theta=1e6,
    **_DEFAULTS,
    **_GEMMA3_SIZES,
)
FAMILIES = {
    "gemma": Family(
        "Gemma 1",
        gemma,
        table(
            (*DECODER, *ATTENTION_BIAS),
            [only("hidden_act", "gelu_pytorch_tanh", "gelu"), only("hidden_activation", None, "gelu_pytorch_tanh")],
            [only("use_bidirectional_attention", None, False)],
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        norms_less_one=True,
        gguf="gemma",
    ),
    "gemma2": Family("Gemma 2", gemma2, _GEMMA2, names=NORM_NAMES, norms_less_one=True, gguf="gemma2"),
    "vaultgemma": Family("VaultGemma", vaultgemma, _GEMMA2, names=NORM_NAMES, norms_less_one=True),
    "gemma3_text": Family(
        "Gemma 3 (text)", gemma3, _GEMMA3, names=NORM_NAMES, norms_less_one=True, gguf="gemma3", more_gguf=(_EMBEDDING,)
    ),
}
