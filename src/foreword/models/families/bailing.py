"""Ling and Ring: Llama with experts, of which each token takes some and shares others; 2.0: experts in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, Family, Rows, decoder, fused_rows, head_dim, module_names
from foreword.models.families.deepseek import ROUTED_NAMES, layers_after_dense, routed_experts, routed_keys
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec


def bailing_moe(config: Config) -> DecoderSpec:
    """Return the spec of Ling 1 and 1.5, which has a softmax over all experts."""
    moe = routed_experts(config, _NAMES, is_sigmoid=False, grouped=False)
    layers = layers_after_dense(config, moe)
    inner = config.size("intermediate_size", moe.intermediate_size if all(layer.moe for layer in layers) else None)
    return decoder(config, "bailing_moe", layers, intermediate_size=inner, **_biases(config))


def bailing_moe_v2(config: Config) -> DecoderSpec:
    """Return the spec of Ling 2.0: the first layers are dense, a part of each head rotates."""
    if (rotated := config.optional("rotary_dim", int)) is not None:
        config = config.with_values({PARTIAL_ROTARY.name: rotated / head_dim(config)})
    moe = routed_experts(config, _NAMES, is_sigmoid=True, grouped=True)
    inner = config.size(_SHARED, moe.intermediate_size)
    moe = replace(moe, shared_intermediate_size=config.count("num_shared_experts") * inner)
    if not config.prefix:  # its reference divides by the sum without a key
        moe = replace(moe, norm_topk=moe.experts_per_token > 1)
    layers = layers_after_dense(config, moe)
    return decoder(config, "bailing_moe_v2", layers, qk_norm=config.get("use_qk_norm", bool), **_biases(config))


def _biases(config: Config) -> dict[str, Any]:
    """Return which products have biases."""
    for name in ("sliding_window", "max_window_layers"):  # without effect: use_sliding_window is false
        config.optional(name, int)
    return {"qkv_bias": config.get("use_qkv_bias", bool), "o_bias": config.get("use_bias", bool), "mlp_bias": False}


def _fused(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of query_key_value."""
    return {name: rows for name, rows in fused_rows(spec).items() if rows.name.startswith("qkv")}


_SHARED = "moe_shared_expert_intermediate_size"
_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_KEYS = (
    *(*DECODER, HIDDEN_ACT, Key("use_qkv_bias", False), Key("use_bias", False)),
    *(Key("sliding_window", kind=int), Key("max_window_layers", kind=int), only("use_sliding_window", False)),
    only("norm_head", False),
)
_LAYER = "model.layers.{i}."
_IN_FILES = {
    **module_names(
        _LAYER,
        {
            "qkv": "attention.query_key_value",
            "o": "attention.dense",
            "q_norm": "attention.query_layernorm",
            "k_norm": "attention.key_layernorm",
        },
        {"embed": "model.word_embeddings"},
    ),
    **ROUTED_NAMES,
    "router_bias": _LAYER + "mlp.gate.expert_bias",
}
FAMILIES = {
    "bailing_moe": Family(
        "Ling 1 and 1.5",
        bailing_moe,
        table(
            *(_KEYS, routed_keys(_NAMES, "n_group", "topk_group", "routed_scaling_factor")),
            [only("routed_scaling_factor", 1.0, gguf="expert_weights_scale")],
            [only("multi_gate", False), only("norm_softmax", False)],
            use_bias=True,
            rms_norm_eps=1e-5,
            norm_topk_prob=True,
            num_shared_experts=0,
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=None,
        ),
        names=_IN_FILES,
        renamed={".mlp.gate.gate_proj.": ".mlp.gate."},
        fused=_fused,
        gguf_fused=lambda spec: {},
        gguf="bailingmoe",
        gguf_interleaved=True,
    ),
    "bailing_moe_v2": Family(
        "Ling and Ring 2.0",
        bailing_moe_v2,
        table(
            *(_KEYS, routed_keys(_NAMES), [PARTIAL_ROTARY, Key("use_qk_norm", True)]),
            [Key("n_group", 8, gguf="expert_group_count"), Key("topk_group", 4, gguf="expert_group_used_count")],
            [Key(_SHARED, gguf="expert_shared_feed_forward_length", kind=int), Key("rotary_dim", kind=int)],
            [Key("num_nextn_predict_layers", 0), only("score_function", "sigmoid")],
            [only("moe_router_enable_expert_bias", True), only("use_expert_bias", True)],
            [only_in_gguf("expert_gating_func", 2)],
            num_key_value_heads=4,
            head_dim=128,
            rope_theta=600000.0,
            num_experts=256,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=512,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
        names=_IN_FILES,
        renamed={".mlp.gate.gate_proj.": ".mlp.gate."},
        fused=_fused,
        gguf="bailingmoe2",
    ),
}
