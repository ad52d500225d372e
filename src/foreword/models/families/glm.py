"""GLM 4: queries and keys in which a part of each head rotates, with biases. Dense: gate and up fused; norms around,
too. With experts: as DeepSeek V3's, norms of queries and keys. Solar Open and dots.llm1: their experts are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.config import Config
from foreword.models.families.base import (
    DECODER,
    HIDDEN_ACT,
    NEXT_TOKEN_HEADS,
    WINDOWS,
    Family,
    Rows,
    decoder,
    num_layers,
    rope,
    windows,
)
from foreword.models.families.deepseek import (
    LOCAL_ROUTED,
    ROUTED_EXPERTS,
    ROUTED_NAMES,
    layers_after_dense,
    routed_experts,
)
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec


def glm(config: Config) -> DecoderSpec:
    return decoder(config, "glm", _layers(config), o_bias=False)


def glm4(config: Config) -> DecoderSpec:
    """Return the spec of GLM 4: GLM with additional norms after attention and after the MLP."""
    return decoder(config, "glm4", _layers(config), o_bias=False, post_norms=True)


def glm4_moe(config: Config) -> DecoderSpec:
    """Return a spec whose first layers have a dense MLP. Only some models have biases and norms of queries and keys."""
    layers = layers_after_dense(config, routed_experts(config, is_sigmoid=True, grouped=True))
    return decoder(config, "glm4_moe", layers, o_bias=False, qk_norm=config.get("use_qk_norm", bool))


def solar_open(config: Config) -> DecoderSpec:
    """Return the spec of Solar Open, which has experts in every layer and no norms of queries and keys."""
    moe = routed_experts(config, is_sigmoid=True, grouped=True)
    layers = (LayerSpec(rope(config), moe=moe),) * num_layers(config)
    inner = moe.intermediate_size  # no layer has a dense MLP
    return decoder(config, "solar_open", layers, intermediate_size=inner, o_bias=False)


def dots1(config: Config) -> DecoderSpec:
    """Return the spec of dots.llm1. Layers from ``max_window_layers`` on have the window."""
    rotary, dense = rope(config), config.get("first_k_dense_replace", int)
    moe, first = routed_experts(config, is_sigmoid=True, grouped=True), config.get("max_window_layers", int)
    spans = windows(config, lambda i: i >= first)
    layers = tuple(LayerSpec(rotary, span, moe if i >= dense else None) for i, span in enumerate(spans))
    return decoder(config, "dots1", layers, qk_norm=True)


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    return (LayerSpec(rope(config)),) * num_layers(config)


def _fused(spec: DecoderSpec) -> Mapping[str, Rows]:
    inner = spec.intermediate_size
    return {"gate": Rows("gate_up", 0, inner), "up": Rows("gate_up", inner, 2 * inner)}


_LAYER = "model.layers.{i}."
_KEYS = table(
    (*DECODER, HIDDEN_ACT, PARTIAL_ROTARY, Key("attention_bias", True)),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-07,
    partial_rotary_factor=0.5,
)
FAMILIES = {
    "glm": Family("GLM 4 (first)", glm, _KEYS, interleaved=True, fused=_fused, gguf="chatglm", gguf_interleaved=True),
    "glm4": Family(
        "GLM 4 (0414)",
        glm4,
        _KEYS,
        names={
            "post_attn_norm": _LAYER + "post_self_attn_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight",
        },
        interleaved=True,
        fused=_fused,
        gguf="glm4",
        gguf_interleaved=True,
    ),
    "glm4_moe": Family(
        "GLM 4.5 to 4.7, with experts",
        glm4_moe,
        table(
            (*DECODER, HIDDEN_ACT, PARTIAL_ROTARY, *ROUTED_EXPERTS, *NEXT_TOKEN_HEADS),
            (Key("attention_bias", False), Key("use_qk_norm", False), only_in_gguf("expert_gating_func", 2, 0)),
            (Key("num_nextn_predict_layers", 1, kind=int), Key("num_mtp_layers", 1, kind=int)),
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        aliases=LOCAL_ROUTED,
        names=ROUTED_NAMES,
        gguf="glm4moe",
        gguf_names={"mlp_norm": "blk.{i}.post_attention_norm.weight"},
    ),
    "solar_open": Family(
        "Solar Open",
        solar_open,
        table(
            (key for key in DECODER if key.name != "intermediate_size"),
            (HIDDEN_ACT, *ROUTED_EXPERTS, Key("attention_bias", False)),
            [only("first_k_dense_replace", 0), only("use_qk_norm", False)],
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            moe_intermediate_size=1280,
            n_routed_experts=128,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        aliases=LOCAL_ROUTED,
        shared_gguf="glm4moe",
        names=ROUTED_NAMES,
    ),
    "dots1": Family(
        "dots.llm1",
        dots1,
        table(
            (*DECODER, HIDDEN_ACT, *ROUTED_EXPERTS, *WINDOWS, Key("attention_bias", False)),
            [Key("sliding_window", 4096, gguf="attention.sliding_window", kind=int), Key("max_window_layers", 62)],
            [only_in_gguf("expert_gating_func", 2, 0)],
            n_group=1,
            topk_group=1,
            moe_intermediate_size=1408,
            n_routed_experts=None,
            n_shared_experts=None,
        ),
        aliases=LOCAL_ROUTED,
        names=ROUTED_NAMES,
        gguf="dots1",
    ),
}
