"""Cohere's Command and Aya: MLP and attention read the same input. Command R7B and A, North Micro: windows, and layers
without rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    EXPERTS,
    HIDDEN_ACT,
    LAYER_NORMED,
    NEXT_TOKEN_HEADS,
    WINDOWS,
    Family,
    decoder,
    experts,
    num_layers,
    rope,
    sliding_flags,
    windows,
)
from foreword.models.families.deepseek import ROUTED_NAMES, sparse_flags
from foreword.models.keys import Key, of_gguf, only, only_in_gguf, table
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec, QKLayerNorm, RopeSpec


def cohere(config: Config) -> DecoderSpec:
    """Return the spec of Command R and Aya; with use_qk_norm, of Command R+."""
    own: dict[str, Any] = {}
    if config.get("use_qk_norm", bool):
        own = {"qk_norm": True, "qk_layer_norm": QKLayerNorm(of_heads=True)}
    return _decoder(config, "cohere", (LayerSpec(rope(config)),) * num_layers(config), **own)


def cohere2(config: Config) -> DecoderSpec:
    """Return a spec of three layers with a window for each one without, which does not rotate."""
    rotary, every = rope(config), config.size("sliding_window_pattern")
    spans = windows(config, lambda i: (i + 1) % every != 0, is_optional=False)
    return _decoder(config, "cohere2", tuple(LayerSpec(rotary if span else None, span) for span in spans))


def cohere2_moe(config: Config) -> DecoderSpec:
    """Return a spec of experts beside attention. The first layers may be dense, with a window and a rotation as
    ``prefix_dense_sliding_window_pattern`` says.
    """
    if not config.prefix and config.value("rope_scaling") is not None:
        raise config.refused("rope_scaling", config.value("rope_scaling"))
    dense = config.count("first_k_dense_replace")
    sparse, flags = sparse_flags(config, dense), sliding_flags(config, _SLIDES, num_layers(config))
    first, every = config.size("prefix_dense_sliding_window_pattern"), config.size("sliding_window_pattern")

    def slides(i: int) -> bool:
        if flags:
            return flags[i]
        return (i + 1) % first != 0 if i < dense else (i - dense + 1) % every != 0

    spans = windows(config, slides, is_optional=False)
    is_average = config.value(_STRATEGY) == "average" or bool(config.prefix)
    rotary, moe = rope(config), _experts(config)
    inner = config.value("prefix_dense_intermediate_size")
    inner = config.size("intermediate_size" if inner is None else "prefix_dense_intermediate_size")
    halves = moe.shared_intermediate_size > 0 and is_average
    layers = tuple(
        LayerSpec(
            rotary if span or (not has and first == 1) else None,
            span,
            moe if has else None,
            mlp_scale=0.5 if has and halves else 1.0,
        )
        for span, has in zip(spans, sparse, strict=True)
    )
    norms = {} if config.value("rms_norm_eps") is None else {"layer_norm": False, "norm_eps": config.positive(_RMS)}
    return _decoder(config, "cohere2_moe", layers, intermediate_size=inner, **norms)


def cohere_compass(config: Config) -> DecoderSpec:
    """Return the spec of North Micro's text model, whose types of layers may each have a rotation of their own, or
    none. Texts are at the same place in all sections of positions.
    """
    spans = windows(config, lambda i: False)
    given = config.value("rope_parameters")
    if isinstance(given, Mapping):
        plain = {kind: _without_sections(value) for kind, value in _without_sections(given).items()}
        config = config.with_values({"rope_parameters": plain})
    rotary = {
        span: _rotation(config, "sliding_attention" if span else "full_attention") for span in dict.fromkeys(spans)
    }
    scale = 1.0 if config.value("logit_scale") is None else config.positive("logit_scale")
    layers = tuple(LayerSpec(rotary[span], span) for span in spans)
    return _decoder(config, "cohere_compass_text", layers, logit_scale=scale)


def _without_sections(value: Any) -> Any:
    sections = ("mrope_section", "mrope_interleaved")
    return {key: one for key, one in value.items() if key not in sections} if isinstance(value, Mapping) else value


def _rotation(config: Config, kind: str) -> RopeSpec | None:
    given = config.value("rope_parameters")
    if not isinstance(given, Mapping) or not given.keys() & {"full_attention", "sliding_attention"}:
        return rope(config)
    return None if given.get(kind) is None else rope(config, kind)


def _experts(config: Config) -> MoeSpec:
    """Return the experts, and the shared ones as one. A softmax is of the chosen experts alone."""
    is_softmax = config.value(_GATING) == 1 if config.prefix else config.value(_SELECTION) == "softmax"
    inner = config.size("moe_intermediate_size" if config.prefix else "intermediate_size")
    shared = config.count("num_shared_experts")
    return replace(
        experts(config),
        intermediate_size=inner,
        norm_topk=(is_softmax and not config.prefix) or config.get("norm_topk_prob", bool),
        scoring="softmax" if is_softmax else "sigmoid",
        shared_intermediate_size=shared and config.size(_SHARED, shared * inner),
        shared_gate=False,
    )


def _decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...], **differences: Any) -> DecoderSpec:
    own: dict[str, Any] = {"layer_norm": True, "parallel_mlp": True, **differences}
    if "logit_scale" not in own:
        own["logit_scale"] = config.positive("logit_scale")
    return decoder(config, architecture, layers, eps="layer_norm_eps", **own)


_COMMON = (
    *(*LAYER_NORMED, HIDDEN_ACT, *ATTENTION_BIAS),
    Key("layer_norm_eps", 1e-5, gguf="attention.layer_norm_epsilon", gguf_default=1e-5),
    Key("logit_scale", 0.0625, gguf="logit_scale", gguf_default=0.0625),
)
_NO_BIASES = {"attn_norm_bias": 0.0, "final_norm_bias": 0.0}
_PATTERN, _RMS = "sliding_window_pattern", "rms_norm_eps"
_STRATEGY, _SELECTION = "shared_expert_combination_strategy", "expert_selection_fn"
_SLIDES, _GATING = "*.attention.sliding_window_pattern", "*.expert_gating_func"
_SHARED = "*.expert_shared_feed_forward_length"
FAMILIES = {
    "cohere": Family(
        "Command R, Aya",
        cohere,
        table(_COMMON, [Key("use_qk_norm", False)], tie_word_embeddings=True, rope_theta=500000.0),
        constants=_NO_BIASES,
        interleaved=True,
        gguf="command-r",
        gguf_interleaved=True,
    ),
    "cohere2": Family(
        "Command R7B, Command A",
        cohere2,
        table(
            *(_COMMON, WINDOWS, [Key(_PATTERN, 4, gguf=f"attention.{_PATTERN}", gguf_default=4)]),
            [only_in_gguf("rope.freq_base_swa", None)],
            tie_word_embeddings=True,
            sliding_window=4096,
        ),
        constants=_NO_BIASES,
        interleaved=True,
        gguf="cohere2",
        gguf_interleaved=True,
    ),
    "cohere2_moe": Family(
        "Command A with experts",
        cohere2_moe,
        table(
            *(_COMMON, WINDOWS, EXPERTS, [Key(_PATTERN, 4), Key("prefix_dense_sliding_window_pattern", 1)]),
            [Key("prefix_dense_intermediate_size", kind=int), Key("mlp_layer_types")],
            [Key(_RMS, gguf="attention.layer_norm_rms_epsilon", kind=float), of_gguf(_SLIDES, kind=list)],
            [Key("first_k_dense_replace", 0, gguf="leading_dense_block_count", gguf_default=0)],
            [Key("num_shared_experts", 0, gguf="expert_shared_count", gguf_default=0)],
            [of_gguf(_GATING, None, (None, 0, 1, 2)), of_gguf(_SHARED, kind=int)],
            [only_in_gguf("rope.freq_base_swa", None), *NEXT_TOKEN_HEADS],
            [Key(_STRATEGY, "average", ("average", "sum")), Key(_SELECTION, "softmax", ("softmax", "sigmoid"))],
            tie_word_embeddings=True,
            sliding_window=4096,
            head_dim=128,
            num_experts=8,
        ),
        names=ROUTED_NAMES,
        constants=_NO_BIASES,
        interleaved=True,
        gguf="cohere2moe",
        gguf_interleaved=True,
    ),
    "cohere_compass_text": Family(
        "North Micro",
        cohere_compass,
        table(
            *(
                _COMMON,
                WINDOWS,
                [Key("logit_scale", kind=float), only("pooling", None, "eos"), Key(_PATTERN, kind=int)],
            ),
            tie_word_embeddings=True,
            sliding_window=4096,
        ),
        constants=_NO_BIASES,
    ),
}
