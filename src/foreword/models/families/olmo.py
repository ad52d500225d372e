"""OLMo 2 and 3, and OLMoE: norms of the queries and of the keys of all heads together. OLMo 2 and 3, and EXAONE 4:
norms after attention and MLP alone.
"""

from __future__ import annotations

import re
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    CLIP_QKV,
    DECODER,
    EXPERTS,
    HIDDEN_ACT,
    LOCAL_EXPERTS,
    WINDOWS,
    Family,
    decoder,
    experts,
    has_window,
    limit_of,
    num_layers,
    rope,
    sliding_flags,
    windows,
)
from foreword.models.keys import Key, of_gguf, only_in_gguf, table
from foreword.models.spec import DecoderSpec, LayerSpec


def olmo(config: Config) -> DecoderSpec:
    """Return the spec of OLMo, which is a Llama with LayerNorm without weights."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    return decoder(config, "olmo", layers, eps=_EPS, layer_norm=True, clip_qkv=limit_of(config, "clip_qkv"))


def olmo2(config: Config) -> DecoderSpec:
    return _decoder(config, "olmo2", (LayerSpec(rope(config)),) * num_layers(config))


def olmo3(config: Config) -> DecoderSpec:
    """Return a spec of three layers with a sliding window for each one without, whose rotary embedding alone is scaled.

    GGUF files list the layers with a window; a file without a window is an OLMo 2.
    """
    slides = [(i + 1) % 4 != 0 for i in range(num_layers(config))]
    if config.value("sliding_window_pattern") is not None:
        listed = config.sequence("sliding_window_pattern")
        if len(listed) != len(slides) or not all(isinstance(one, bool) for one in listed):
            reason = f"sliding_window_pattern {listed!r:.80} is not {len(slides)} of true and false"
            raise config.error(reason, USE_ITS_CONFIG)
        slides = [*listed]
    unscaled = config.with_values({"rope_scaling": None})
    full, local = (rope(one, kind) for one, kind in ((config, "full_attention"), (unscaled, "sliding_attention")))
    own = (config.value("rope_parameters") or {}).get("sliding_attention") or {}
    theta = _THETA if config.prefix or "rope_theta" in own else config.positive("rope_theta")
    if theta != _THETA:
        reason = f"rope_theta = {theta} is not that of sliding layers in the reference, which is {_THETA}"
        raise config.error(reason, "Give rope_parameters of sliding_attention, with rope_theta")
    spans = windows(config, lambda i: slides[i])
    return _decoder(config, "olmo3", tuple(LayerSpec(local if span else full, span) for span in spans))


def exaone4(config: Config) -> DecoderSpec:
    """Return the spec of EXAONE 4, which has norms of each head."""
    return decoder(config, "exaone4", hybrid_layers(config), pre_norms=False, post_norms=True, qk_norm=True)


def hybrid_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Return layers of which, with a window, the last of every ``sliding_window_pattern`` layers, or of its number of
    letters (LLLG), has full attention without rotation, and the others have the window. GGUF files may list them. Raise
    ModelError for a pattern of another form.
    """
    rotary, has_windows, key = rope(config), has_window(config), "sliding_window_pattern"
    is_list = bool(config.prefix) and isinstance(config.value(key), list)
    flags = sliding_flags(config, key, num_layers(config)) if is_list else ()
    every = 1 if flags else _pattern(config)
    spans = windows(config, lambda i: flags[i] if flags else (i + 1) % every != 0)
    return tuple(LayerSpec(rotary if span or not has_windows else None, span) for span in spans)


def _pattern(config: Config) -> int:
    """Return the number of layers from one with full attention to the next; 1 where nothing depends on it."""
    key = "sliding_window_pattern"
    pattern = config.value(key)
    if isinstance(pattern, str):
        if re.fullmatch("L*G", pattern) is None:
            raise config.error(f"{key} = {pattern!r:.80} is not supported", "Use a model with letters such as LLLG")
        return len(pattern)
    if not has_window(config) or config.value("layer_types") is not None:
        config.optional(key, int)
        return 1
    if pattern is None:
        raise config.error(f"{key} is null beside a sliding_window", USE_ITS_CONFIG)
    return config.size(key)


def olmoe(config: Config) -> DecoderSpec:
    layers = (LayerSpec(rope(config), moe=experts(config)),) * num_layers(config)
    limit = limit_of(config, "clip_qkv")
    return decoder(config, "olmoe", layers, qk_norm=True, joint_qk_norm=True, clip_qkv=limit)


def flex_olmo(config: Config) -> DecoderSpec:
    """Return the spec of FlexOlmo, which is an OLMo 2 with experts."""
    return _decoder(config, "flex_olmo", (LayerSpec(rope(config), moe=experts(config)),) * num_layers(config))


def _decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    norms: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "joint_qk_norm": True}
    return decoder(config, architecture, layers, **norms)


_NAMES = {
    "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_EPS = "*.attention.layer_norm_epsilon"
_CONSTANTS = {
    f"{name}_norm{end}": value for name in ("attn", "mlp", "final") for end, value in (("", 1.0), ("_bias", 0.0))
}
_COMMON = (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS)
_THETA = 5e5
_OLMO3 = (
    *WINDOWS,
    Key("sliding_window", 4096, gguf="attention.sliding_window", kind=int),
    Key("sliding_window_pattern", gguf="attention.sliding_window_pattern"),
)
FAMILIES = {
    "olmo": Family(
        "OLMo (2024)",
        olmo,
        table(
            (key for key in _COMMON if key.name != "rms_norm_eps"),
            [only_in_gguf("attention.layer_norm_rms_epsilon", None), CLIP_QKV],
            [of_gguf(_EPS, 1e-5, gguf_default=1e-5)],
        ),
        constants=_CONSTANTS,
        gguf="olmo",
        gguf_interleaved=True,
    ),
    "olmo2": Family("OLMo 2", olmo2, table(_COMMON, rms_norm_eps=1e-5), names=_NAMES, gguf="olmo2"),
    "exaone4": Family(
        "EXAONE 4",
        exaone4,
        table(
            (*_COMMON, *WINDOWS),
            [Key("sliding_window", 4096, gguf="attention.sliding_window", kind=int)],
            [Key("sliding_window_pattern", 4, gguf="attention.sliding_window_pattern", gguf_default=4, kind=object)],
            rms_norm_eps=1e-5,
        ),
        names=_NAMES,
        gguf="exaone4",
    ),
    "olmoe": Family(
        "OLMoE",
        olmoe,
        table(
            (*_COMMON, *EXPERTS, Key("clip_qkv", kind=float)),
            [Key("norm_topk_prob", False, gguf="expert_weights_norm", gguf_default=False)],
            rms_norm_eps=1e-5,
            num_experts=64,
            num_experts_per_tok=8,
        ),
        aliases=LOCAL_EXPERTS,
        gguf="olmoe",
    ),
    "flex_olmo": Family(
        "FlexOlmo",
        flex_olmo,
        table(
            (*_COMMON, *EXPERTS), [Key("norm_topk_prob", False)], rope_theta=5e5, num_experts=7, num_experts_per_tok=5
        ),
        aliases=LOCAL_EXPERTS,
        names=_NAMES,
    ),
    "olmo3": Family(
        "OLMo 3", olmo3, table(_COMMON, _OLMO3, rms_norm_eps=1e-5, rope_theta=_THETA), names=_NAMES, gguf="olmo2"
    ),
}
