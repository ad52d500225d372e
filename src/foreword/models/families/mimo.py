"""MiMo V2 Flash: values that are smaller than keys, sinks in layers with a window, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreword.models.config import EXPERT_LAYERS, USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    NEXT_TOKEN_HEADS,
    WINDOWS,
    Family,
    decoder,
    head_dim,
    num_layers,
)
from foreword.models.families.deepseek import LOCAL_ROUTED, ROUTED_NAMES, routed_experts, routed_keys, sparse_flags
from foreword.models.families.routed import LOCAL_DIM, ROPES_OF_KINDS, SLIDES, layers_by_kind
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY, ROTARY_DIM
from foreword.models.spec import DecoderSpec, HeadShape


def mimo_v2_flash(config: Config) -> DecoderSpec:
    """Return the spec of MiMo V2 Flash. Its values have a factor, which is that of the output of attention, too."""
    config = _of_gguf(config) if config.prefix else _as_reference(config)
    count, dim = num_layers(config), head_dim(config)
    sparse = _sparse_in_gguf(config) if config.prefix else sparse_flags(config, 1)
    moe = routed_experts(config, is_sigmoid=True, grouped=True)
    heads, value_dim = config.size("num_attention_heads"), config.size("v_head_dim", dim)
    for key, size in (("swa_num_attention_heads", heads), ("v_head_dim_swa", value_dim)):
        if config.value(key) not in (None, size):
            raise config.refused(key, config.value(key))
    layers, counts = layers_by_kind(config, -1), _kv_heads(config, count)
    scale = config.positive("attention_value_scale", 1.0)
    own = next((n for n, layer in zip(counts, layers, strict=True) if layer.sliding_window is None), counts[0])
    return decoder(
        config,
        "mimo_v2_flash",
        tuple(
            replace(
                layer,
                moe=moe if has else None,
                heads=None if kv == own else HeadShape(kv, dim, heads, value_dim),
                has_sinks=layer.sliding_window is not None,
                mixer_scale=scale,
            )
            for layer, has, kv in zip(layers, sparse, counts, strict=True)
        ),
        same_as_head_dim=("head_dim_swa",),
        num_kv_heads=own,
        value_dim=value_dim if value_dim != dim else 0,
        o_bias=False,
    )


def _as_reference(config: Config) -> Config:
    """Return the config with the keys of the reference in the place of those of the published file."""
    count, values = num_layers(config), dict[str, Any]()
    kinds = {"layer_types": ("hybrid_layer_pattern", ("full_attention", "sliding_attention")),
             "mlp_layer_types": ("moe_layer_freq", ("dense", "sparse"))}  # fmt: skip
    for key, (own, names) in kinds.items():
        if (flags := config.value(own)) is None:
            continue
        if not isinstance(flags, list) or len(flags) != count or not all(flag in (0, 1) for flag in flags):
            raise config.error(f"{own} {flags!r:.80} is not {count} of 0 and 1", USE_ITS_CONFIG)
        listed = [names[flag] for flag in flags]
        if config.value(key) not in (None, listed):
            raise config.error(f"{key} says other layers than {own}", USE_ITS_CONFIG)
        values[key] = listed
    if config.value("layer_types") is None and "layer_types" not in values:
        slides = [i > 0 and (i + 1) % 6 != 0 for i in range(count)]
        values["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if (before := config.optional("sliding_window_size", int)) is not None:  # without the token itself
        values["sliding_window"] = before + 1
    if config.value("routed_scaling_factor") is None:
        values["routed_scaling_factor"] = 1.0
    if config.value("rope_parameters") is None:
        thetas = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
        values["rope_parameters"] = {kind: {"rope_theta": config.positive(key)} for kind, key in thetas.items()}
    return config.with_values(values)


def _of_gguf(config: Config) -> Config:
    """Return the config of a GGUF file, whose layers of both kinds rotate as many dimensions, as it has no others."""
    slides = config.value(SLIDES)
    is_list = isinstance(slides, list) and all(slide in (0, 1) for slide in slides)
    flags = [bool(slide) for slide in slides[: num_layers(config)]] if is_list else slides
    dim = config.value(LOCAL_DIM)
    return config.with_values({SLIDES: flags, LOCAL_DIM: config.value(ROTARY_DIM) if dim is None else dim})


def _sparse_in_gguf(config: Config) -> list[bool]:
    listed = config.sequence(EXPERT_LAYERS)
    return [i in listed for i in range(num_layers(config))]


def _kv_heads(config: Config, count: int) -> list[int]:
    """Return the key heads of each layer: those of layers with a window are twice those of others, or as many as the
    published file says. GGUF files list them, those of heads for further tokens included.
    """
    value = config.value("num_key_value_heads")
    if isinstance(value, list):
        if len(value) < count or not all(type(n) is int and n > 0 for n in value):
            label = config.label("num_key_value_heads")
            raise config.error(f"{label} {value!r:.80} are not {count} numbers of heads", USE_ITS_CONFIG)
        return value[:count]
    full = config.size("num_key_value_heads")
    local = full if config.prefix else config.size("swa_num_key_value_heads", 2 * full)
    return [local if kind == "sliding_attention" else full for kind in config.sequence("layer_types") or [""] * count]


FAMILIES = {
    "mimo_v2_flash": Family(
        "MiMo V2 Flash",
        mimo_v2_flash,
        table(
            (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS, *WINDOWS, *NEXT_TOKEN_HEADS),
            routed_keys({}, "first_k_dense_replace"),
            (*ROPES_OF_KINDS, PARTIAL_ROTARY, Key(EXPERT_LAYERS, kind=list), Key("mlp_layer_types")),
            [Key("attention_value_scale", 0.707, gguf="attention.value_scale", gguf_default=1.0)],
            [Key("norm_topk_prob", True, gguf="expert_weights_norm", gguf_default=True)],
            [Key("num_key_value_heads", 4, gguf="attention.head_count_kv", kind=object)],
            [Key("swa_rope_theta", 10000.0), Key("hybrid_layer_pattern", kind=list), Key("moe_layer_freq", kind=list)],
            [Key(f"swa_num_{name}_heads", kind=int) for name in ("attention", "key_value")],
            [
                Key("head_dim_swa", gguf="attention.key_length_swa", kind=int, own="swa_head_dim"),
                Key("v_head_dim_swa", gguf="attention.value_length_swa", kind=int, own="swa_v_head_dim"),
            ],
            [Key("sliding_window_size", kind=int), only("topk_method", "noaux_tc"), only("scoring_func", "sigmoid")],
            [only("add_swa_attention_sink_bias", True), only("add_full_attention_sink_bias", False)],
            [only_in_gguf("expert_gating_func", 2, 0)],
            num_key_value_heads=4,
            head_dim=192,
            v_head_dim=128,
            sliding_window=129,
            rms_norm_eps=1e-5,
            rope_theta=5_000_000.0,
            partial_rotary_factor=0.334,
            moe_intermediate_size=2048,
            num_experts_per_tok=8,
            n_routed_experts=256,
            n_shared_experts=0,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
        ),
        aliases={**LOCAL_ROUTED, "layernorm_epsilon": "rms_norm_eps"},
        names={**ROUTED_NAMES, "sinks": "model.layers.{i}.self_attn.sinks"},
        renamed={".self_attn.attention_sink_bias": ".self_attn.sinks"},
        unused=("score.", "model.mtp."),
        gguf="mimo2",
    )
}
