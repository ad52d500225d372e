"""Families with experts as DeepSeek V3's, or a sigmoid router without a bias, behind attention of another form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    EXPERTS,
    HIDDEN_ACT,
    LOCAL_EXPERTS,
    NEXT_TOKEN_HEADS,
    NO_EXPERT_BIASES,
    NORMED_EXPERTS,
    SHARED_EXPERT,
    SPARSE_LAYERS,
    WINDOWS,
    WITH_BIASES,
    Family,
    check_groups,
    decoder,
    experts,
    has_window,
    head_dim,
    kv_heads,
    num_layers,
    rope,
    sliding_flags,
    sparse_layers,
    windows,
)
from foreword.models.families.deepseek import (
    ROUTED_NAMES,
    layers_after_dense,
    routed_experts,
    routed_keys,
    sparse_flags,
)
from foreword.models.families.olmo import hybrid_layers
from foreword.models.keys import Key, of_gguf, only, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY, ROTARY_DIM, check_bases
from foreword.models.spec import DecoderSpec, HeadShape, LayerSpec, MoeSpec


def afmoe(config: Config) -> DecoderSpec:
    """Return the spec of Trinity: attention with a gate, which rotates in layers with a window alone."""
    rotary, every = rope(config), config.size("global_attn_every_n_layers")
    dense = config.get("num_dense_layers", int)
    moe = routed_experts(config, _AFMOE, is_sigmoid=True, grouped=False)
    spans = windows(config, lambda i: (i + 1) % every != 0, is_optional=False)
    layers = (LayerSpec(rotary if span else None, span, moe if i >= dense else None) for i, span in enumerate(spans))
    is_scaled = config.get("mup_enabled", bool) or bool(config.prefix)  # GGUF files are of such models
    scale = math.sqrt(config.size("hidden_size")) if is_scaled else 1.0
    return decoder(config, "afmoe", tuple(layers), qk_norm=True, attn_gate=True, post_norms=True, embedding_scale=scale)


def deepseek(config: Config) -> DecoderSpec:
    """Return the spec of the first DeepSeek MoE: a Llama whose first layers, or all, have no experts."""
    moe = None
    if config.value("n_routed_experts") is not None:
        moe = routed_experts(config, is_sigmoid=False, grouped=False)
    return decoder(config, "deepseek", layers_after_dense(config, moe), o_bias=config.get("attention_bias", bool))


def exaone_moe(config: Config) -> DecoderSpec:
    """Return the spec of K-EXAONE, which is an EXAONE 4 with experts and norms before attention and MLP."""
    moe = routed_experts(config, _EXAONE, is_sigmoid=True, grouped=True)
    if config.value(_SHARED_SIZE) not in (None, moe.shared_intermediate_size):
        raise config.refused(_SHARED_SIZE, config.value(_SHARED_SIZE))
    sparse = sparse_flags(config, config.get("first_k_dense_replace", int))
    layers = (
        replace(layer, moe=moe if has else None) for layer, has in zip(hybrid_layers(config), sparse, strict=True)
    )
    return decoder(config, "exaone_moe", tuple(layers), qk_norm=True)


def hy_v3(config: Config) -> DecoderSpec:
    """Return the spec of Hunyuan 3. A shared expert without a width has that of the MLP."""
    moe, rotary = routed_experts(config, _HUNYUAN, is_sigmoid=True, grouped=False), rope(config)
    moe = replace(moe, shared_intermediate_size=moe.shared_intermediate_size or config.size("intermediate_size"))
    layers = tuple(LayerSpec(rotary, moe=moe if has else None) for has in sparse_flags(config, 1))
    return decoder(config, "hy_v3", layers, qk_norm=True)


def flint(config: Config) -> DecoderSpec:
    """Return the spec of Flint: attention sinks, and a rotation in layers with a window alone."""
    if config.value("mlp_only_layers") is None:
        config = config.with_values({"mlp_only_layers": [0, 1]})
    rotary, last = rope(config), num_layers(config) - 1
    spans = windows(config, lambda i: i >= 2 and i % 4 != 1 and i != last, is_optional=False)
    sparse = (moe and replace(moe, scoring="sigmoid", shared_gate=False) for moe in sparse_layers(config, shared=True))
    layers = (
        LayerSpec(rotary if span else None, span, moe, has_sinks=True) for span, moe in zip(spans, sparse, strict=True)
    )
    return decoder(config, "flint", tuple(layers), qk_norm=True)


def mellum(config: Config) -> DecoderSpec:
    """Return the spec of Mellum 2: a Qwen3 whose layers with a window have rotary parameters of their own."""
    config, moe = with_ropes(config, _MELLUM_ROPE), experts(config)
    layers = (
        replace(layer, moe=moe if has else None)
        for layer, has in zip(layers_by_kind(config, -1), sparse_flags(config, 0), strict=True)
    )
    return decoder(config, "mellum", tuple(layers), qk_norm=True)


def with_ropes(config: Config, ropes: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the config with these rotary parameters of the kinds of layers if it has none. Raise ModelError for those
    of all layers, which the references do not read.
    """
    if config.prefix:
        return config
    for key, usual in (("rope_theta", 10000.0), ("rope_scaling", None)):
        if config.value(key) not in (usual, None, {}):
            raise config.refused(key, config.value(key))
    return config if config.value("rope_parameters") is not None else config.with_values({"rope_parameters": ropes})


def layers_by_kind(config: Config, full: int) -> list[LayerSpec]:
    """Return layers with full attention, or a window where ``layer_types`` says so, each kind with its rotation. full:
    of every few layers of a GGUF file that does not list them, the number of the one with full attention.
    """
    if config.prefix:
        return _by_kind_in_gguf(config, full)
    spans = windows(config, lambda i: False)
    kinds = ["sliding_attention" if span else "full_attention" for span in spans]
    check_bases(config, {*kinds})
    ropes = {kind: rope(config, kind) for kind in {*kinds}}
    return [LayerSpec(ropes[kind], span) for kind, span in zip(kinds, spans, strict=True)]


def _by_kind_in_gguf(config: Config, full: int) -> list[LayerSpec]:
    """See `layers_by_kind`. Layers with a window rotate whole heads, without a scaling. Raise ModelError for a list of
    layers with a window without a window.
    """
    if isinstance(config.value(SLIDES), list):
        flags = sliding_flags(config, SLIDES, num_layers(config)) or [False] * num_layers(config)
        spans = windows(config, lambda i: flags[i])
        if any(flags) and not any(spans):
            reason = f"{config.label('sliding_window')} = {config.value('sliding_window')}, but some layers are sliding"
            raise config.error(reason, USE_ITS_CONFIG)
    else:
        every = config.size(SLIDES, 4)
        spans = windows(config, lambda i: i % every != full % every)
    unscaled = {
        "rope_scaling": None,
        "rope_theta": config.positive(_LOCAL_THETA, config.positive("rope_theta")),
        ROTARY_DIM: config.size(LOCAL_DIM, head_dim(config)),
    }
    own, local = rope(config), rope(config.with_values(unscaled))
    return [LayerSpec(local if span else own, span) for span in spans]


def laguna(config: Config) -> DecoderSpec:
    """Return the spec of Laguna: layers may differ in the number of heads of their queries. The gate of the outputs of
    attention is a softplus, one number per head or per output.
    """
    if not config.prefix and config.value("partial_rotary_factor") != 1.0:
        raise config.refused("partial_rotary_factor", config.value("partial_rotary_factor"))
    count, key = num_layers(config), "num_attention_heads" if config.prefix else _HEADS
    has_one = config.value(key) is None or (config.prefix and not isinstance(config.value(key), list))
    heads = [config.size("num_attention_heads")] * count if has_one else config.sequence(key)
    if len(heads) != count or not all(type(one) is int and 0 < one <= 1 << 16 for one in heads):
        raise config.error(f"{config.label(key)} {heads!r:.80} is not {count} numbers of heads", USE_ITS_CONFIG)
    config = config.with_values({"num_attention_heads": heads[0]}) if config.prefix else config
    config, cap = with_ropes(config, _LAGUNA_ROPE), config.get("moe_router_logit_softcapping", float)
    moe = replace(
        experts(config, shared=True),
        scoring="sigmoid",
        router_bias=True,
        shared_gate=False,
        scale=config.positive("moe_routed_scaling_factor"),
        softcap=cap if cap > 0 else None,
    )
    first = HeadShape(kv_heads(config, heads[0]), head_dim(config), heads[0], head_dim(config))
    shapes = [first._replace(num_heads=one) for one in heads]
    layers = (
        replace(layer, moe=moe if has else None, heads=None if shape == first else shape)
        for layer, has, shape in zip(
            layers_by_kind(config, 0), sparse_flags(config, config.get(_DENSE, int, 1)), shapes, strict=True
        )
    )
    gates: dict[str, Any] = {"attn_gate": True, "softplus_gates": True}
    is_of_head = config.value("gating") in (True, "per-head")
    return decoder(config, "laguna", tuple(layers), qk_norm=True, num_heads=heads[0], head_gates=is_of_head, **gates)


def kolibri(config: Config) -> DecoderSpec:
    """Return the spec of Kolibri 1: a rotation in layers with a window alone, and experts that are chosen by the biased
    outputs of their router.
    """
    rotary, inner = rope(config), config.size("moe_intermediate_size")
    spans = windows(config, lambda i: (i + 1) % 5 != 0)
    moe = replace(
        experts(config, shared=True), scoring="sigmoid", router_bias=True, ranks_outputs=True, shared_gate=False
    )
    rotates = [span is not None or not has_window(config) for span in spans]
    layers = tuple(LayerSpec(rotary if turns else None, span, moe) for span, turns in zip(spans, rotates, strict=True))
    return decoder(config, "kolibri1", layers, intermediate_size=inner, qk_norm=True, post_norms=True)


def aria(config: Config) -> DecoderSpec:
    """Return the spec of the decoder of Aria, a Llama with experts that are as wide as its MLP would be."""
    inner = config.size("intermediate_size")
    moe = MoeSpec(
        config.size("moe_num_experts"),
        config.size("moe_topk"),
        inner,
        shared_intermediate_size=config.count("moe_num_shared_experts") * inner,
        shared_gate=False,
    )
    check_groups(config, moe)
    return decoder(config, "aria_text", (LayerSpec(rope(config), moe=moe),) * num_layers(config))


_AFMOE = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "first_k_dense_replace": "num_dense_layers",
}
_EXAONE = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_HUNYUAN = {**_EXAONE, "routed_scaling_factor": "router_scaling_factor"}
_GROUPS = ("n_group", "topk_group")
_NORMED = Key("norm_topk_prob", True, (True,), gguf="expert_weights_norm", gguf_default=True)
_MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_LAGUNA_ROPE = {
    **_MELLUM_ROPE,
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
}
_HEADS = "num_attention_heads_per_layer"
SLIDES, _LOCAL_THETA = "*.attention.sliding_window_pattern", "*.rope.freq_base_swa"
LOCAL_DIM, _DENSE = "*.rope.dimension_count_swa", "*.leading_dense_block_count"
ROPES_OF_KINDS = (
    Key("rope_theta", 10000.0, gguf="rope.freq_base", gguf_default=10000.0),
    Key("rope_scaling"),
    of_gguf(SLIDES, kind=object),
    of_gguf(_LOCAL_THETA, kind=float),
    of_gguf(LOCAL_DIM, kind=int),
)
"""Keys of the rotations of kinds of layers: see `layers_by_kind`."""
_PATTERN, _SHARED_SIZE = "attention.sliding_window_pattern", "*.expert_shared_feed_forward_length"
_LAYER, _MLP = "model.layers.{i}.", "model.layers.{i}.mlp."
FAMILIES = {
    "deepseek": Family(
        "DeepSeek MoE (2024)",
        deepseek,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *routed_keys({}, "n_group", "topk_group")),
            [Key("n_routed_experts", gguf="expert_count", kind=int)],
            [only("moe_layer_freq", 1), only("scoring_func", "softmax")],
        ),
        names=ROUTED_NAMES,
        gguf="deepseek",
        gguf_interleaved=True,
    ),
    "afmoe": Family(
        "Trinity (AFMoE)",
        afmoe,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *WINDOWS, *routed_keys(_AFMOE, *_GROUPS), _NORMED),
            [Key("global_attn_every_n_layers", 4, gguf=_PATTERN, gguf_default=4), Key("mup_enabled", False)],
            [only_in_gguf("expert_gating_func", 2, 0), only_in_gguf("rope.freq_base_swa", None)],
            head_dim=128,
            rms_norm_eps=1e-5,
            sliding_window=1024,
            num_dense_layers=1,
            moe_intermediate_size=1408,
            num_experts_per_tok=6,
        ),
        names={
            **ROUTED_NAMES,
            "router": _MLP + "router.gate.weight",
            "router_bias": _MLP + "expert_bias",
            "attn_gate": _LAYER + "self_attn.gate_proj.weight",
            "post_attn_norm": _LAYER + "post_attention_layernorm.weight",
            "mlp_norm": _LAYER + "pre_mlp_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight",
        },
        constants={"attn_gate_bias": 0.0},
        gguf="afmoe",
        gguf_names={"attn_gate": "blk.{i}.attn_gate.weight"},
    ),
    "exaone_moe": Family(
        "K-EXAONE",
        exaone_moe,
        table(
            (*DECODER, HIDDEN_ACT, *WINDOWS, *NEXT_TOKEN_HEADS, *routed_keys(_EXAONE)),
            [Key("sliding_window", 4096, gguf="attention.sliding_window", kind=int), Key("mlp_layer_types")],
            [Key("sliding_window_pattern", 4, gguf=_PATTERN, gguf_default=4, kind=object)],
            [of_gguf(_SHARED_SIZE, kind=int), only_in_gguf("expert_gating_func", 2, 0)],
            num_key_value_heads=32,
            rms_norm_eps=1e-5,
            first_k_dense_replace=1,
            moe_intermediate_size=1024,
            num_shared_experts=1,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            n_group=1,
            topk_group=1,
        ),
        names=ROUTED_NAMES,
        renamed={".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
        unused=("score.", "mtp."),
        gguf="exaone-moe",
    ),
    "hy_v3": Family(
        "Hunyuan 3",
        hy_v3,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *routed_keys(_HUNYUAN, *_GROUPS, "first_k_dense_replace"), _NORMED),
            [Key("mlp_layer_types"), only("enable_moe_fp32_combine", True, False)],
            [Key("mlp_bias", False)],
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=11_158_840.0,
            num_experts=192,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=1536,
            router_scaling_factor=2.826,
        ),
        aliases=LOCAL_EXPERTS,
        names={**ROUTED_NAMES, "router_bias": _MLP + "e_score_correction_bias"},
        constants=NO_EXPERT_BIASES,
        renamed={
            ".mlp.router.gate.": ".mlp.gate.",
            ".mlp.expert_bias": ".mlp.e_score_correction_bias",
            ".mlp.shared_mlp.": ".mlp.shared_experts.",
        },
        unused=("score.", "model.layers.80."),
    ),
    "flint": Family(
        "Flint",
        flint,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *WINDOWS, *EXPERTS, *SPARSE_LAYERS, SHARED_EXPERT),
            num_key_value_heads=4,
            head_dim=128,
            sliding_window=513,
            num_experts=256,
            num_experts_per_tok=6,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=1024,
        ),
        names={"sinks": _LAYER + "self_attn.sinks"},
        renamed={".self_attn.softmax_offset": ".self_attn.sinks"},
    ),
    "mellum": Family(
        "Mellum 2",
        mellum,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *WINDOWS, *EXPERTS, Key("mlp_layer_types"), *ROPES_OF_KINDS),
            [Key(name, kind=int) for name in ("num_mtp_layers", "num_nextn_predict_layers")],
            num_key_value_heads=4,
            head_dim=128,
            sliding_window=1024,
            num_local_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=896,
        ),
        unused=("score.", "mtp."),
        gguf="mellum",
    ),
    "laguna": Family(
        "Laguna",
        laguna,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *WINDOWS, *NORMED_EXPERTS, SHARED_EXPERT),
            (*ROPES_OF_KINDS, PARTIAL_ROTARY, of_gguf(_DENSE, kind=int)),
            [Key("gating", True, (True, "per-head", "per-element")), Key(_HEADS), Key("mlp_layer_types")],
            [
                Key("num_attention_heads", gguf="attention.head_count", kind=object),
                only_in_gguf("expert_gating_func", 2, 0),
            ],
            [Key("moe_routed_scaling_factor", 1.0, gguf="expert_weights_scale", gguf_default=1.0)],
            [Key("moe_router_logit_softcapping", 0.0, gguf="router_logit_softcapping", gguf_default=0.0)],
            [only("moe_apply_router_weight_on_input", False)],
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=512,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        names={
            "attn_gate": _LAYER + "self_attn.g_proj.weight",
            "router_bias": _MLP + "experts.e_score_correction_bias",
        },
        constants={"attn_gate_bias": 0.0},
        gguf="laguna",
        gguf_names={"attn_gate": "blk.{i}.attn_gate.weight"},
        renamed={
            ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
            ".mlp.gate.proj.weight": ".mlp.gate.weight",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
    ),
    "kolibri1": Family(
        "Kolibri 1",
        kolibri,
        table(
            (*(key for key in DECODER if key.name != "intermediate_size"), HIDDEN_ACT, *WINDOWS, *EXPERTS),
            [SHARED_EXPERT],
            head_dim=128,
            num_key_value_heads=4,
            sliding_window=513,
            num_local_experts=384,
            num_experts_per_tok=6,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=False,
        ),
        names={
            **ROUTED_NAMES,
            "post_attn_norm": _LAYER + "post_self_attn_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight",
        },
        renamed={
            ".moe.router.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".post_attn_norm.": ".post_self_attn_layernorm.",
            ".post_ffn_norm.": ".post_mlp_layernorm.",
        },
    ),
    "aria_text": Family(
        "Aria, its decoder",
        aria,
        table(
            (*DECODER, *WITH_BIASES, only("hidden_act", "silu", "swish")),
            [Key("moe_num_experts", 8), Key("moe_topk", 2), Key("moe_num_shared_experts", 2)],
        ),
        names={**ROUTED_NAMES, "router": _MLP + "router.weight"},
        constants=NO_EXPERT_BIASES,
        renamed={
            ".mlp.experts.fc1.weight": ".mlp.experts.gate_up_proj",
            ".mlp.experts.fc2.weight": ".mlp.experts.down_proj",
        },
        unused=("score.", "vision_tower.", "multi_modal_projector."),
        transposed_experts=True,
        peft_swaps_experts="never",
    ),
}
