"""Nemotron-H: layers that are Mamba 2, attention without rotation, an MLP of squared ReLU or experts, each alone."""

from __future__ import annotations

import math

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    DECODER,
    NO_EXPERT_BIASES,
    Family,
    check_groups,
    decoder,
    module_names,
    num_layers,
    rope,
)
from foreword.models.families.deepseek import LOCAL_ROUTED
from foreword.models.families.mamba import fused_mamba
from foreword.models.families.states import STATE_NAMES_IN_GGUF, check_state, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba",
          "full_attention": "attention"}  # fmt: skip
"""Other names of the kinds of layers: in ``hybrid_override_pattern``, and in configurations of transformers 5."""


def nemotron_h(config: Config) -> DecoderSpec:
    kinds = _kinds_in_gguf(config) if config.prefix else _kinds(config)
    if not kinds or not set(kinds) <= {"mamba", "attention", "mlp", "moe"}:
        reason = f"layers {kinds!r:.80} are not of mamba, attention, mlp and moe"
        raise config.error(reason, "Use a model with layers of these kinds")
    if (count := config.optional("num_hidden_layers", int)) not in (None, len(kinds)):
        raise config.error(f"num_hidden_layers = {count}, but {len(kinds)} kinds are given", USE_ITS_CONFIG)
    if not {"attention", "mamba"} & set(kinds):
        raise config.error("the model has neither mamba nor attention layers", "Use a model that has one of them")
    if not config.prefix and config.get("tie_word_embeddings", bool):
        reason = "tie_word_embeddings = True, while the head of this family is a tensor of its own"
        raise config.error(reason, "Use a model with tie_word_embeddings = False")
    heads = config.size("mamba_num_heads")
    inner = config.size("mamba_inner", heads * config.size("mamba_head_dim"))  # a key of GGUF files
    recurrent = RecurrentSpec(
        "mamba2",
        num_heads=heads,
        num_key_heads=config.size("n_groups"),
        key_dim=config.size("ssm_state_size"),
        value_dim=max(1, inner // heads),
        conv_kernel=config.size("conv_kernel", most=1 << 8),
        conv_bias=config.get("use_conv_bias", bool),
        in_bias=config.get("use_bias", bool),
        o_bias=config.get("use_bias", bool),
        least_step=0.0 if config.prefix else config.get("time_step_min", float),  # llama.cpp has none
    )
    check_state(config, recurrent)
    layer = {
        "mamba": LayerSpec(None, recurrent=recurrent, has_mlp=False),
        "attention": LayerSpec(None, has_mlp=False),
        "mlp": LayerSpec(None, has_mixer=False),
    }
    if "moe" in kinds:
        layer["moe"] = LayerSpec(None, moe=_experts(config), has_mixer=False)
    for name in ("n_shared_experts", "moe_shared_expert_overlap", "expand"):  # without effect: what has a width counts
        config.value(name)
    rope(config)  # no layer rotates, but the keys are checked
    return decoder(
        config,
        "nemotron_h",
        tuple(layer[kind] for kind in kinds),
        act="mlp_hidden_act",
        eps="layer_norm_epsilon",
        intermediate_size=_width(config),
        gated_mlp=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=config.get("mlp_bias", bool),
    )


def _experts(config: Config) -> MoeSpec:
    """Return the experts. In a config.json a shared expert without a width has that of an MLP."""
    shared = config.count("moe_shared_expert_intermediate_size")
    moe = MoeSpec(
        num_experts=config.size("n_routed_experts", most=1 << 16),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        norm_topk=config.get("norm_topk_prob", bool),
        shared_intermediate_size=shared or (0 if config.prefix else _width(config)),
        shared_gate=False,
        scoring="sigmoid",
        router_bias=True,
        scale=config.positive("routed_scaling_factor"),
        sum_eps=1e-20,
        num_groups=config.size("n_group"),
        groups_per_token=config.size("topk_group"),
        latent_size=0 if config.value("moe_latent_size") is None else config.size("moe_latent_size"),
    )
    check_groups(config, moe)
    if moe.latent_size and config.get("mlp_bias", bool):
        raise config.error("mlp_bias = True with moe_latent_size is not supported", USE_ITS_CONFIG)
    return moe


def _kinds(config: Config) -> list[str]:
    pattern = config.optional("hybrid_override_pattern", str)
    if pattern is not None and not (pattern and set(pattern) <= {"M", "*", "-", "E"}):
        raise config.error(f"hybrid_override_pattern {pattern!r:.80} is not of M, *, - and E", USE_ITS_CONFIG)
    listed = config.sequence("layers_block_type") or pattern or ""
    return [_KINDS.get(str(kind), str(kind)) for kind in listed]


def _kinds_in_gguf(config: Config) -> list[str]:
    """Return the kind of each layer: with key/value heads attention; with a width experts or, without any, an MLP."""
    heads, widths = config.sequence("num_key_value_heads"), config.sequence("intermediate_size")
    if not len(heads) == len(widths) == num_layers(config):
        reason = "num_key_value_heads and intermediate_size are not lists of one number per layer"
        raise config.error(reason, USE_ITS_CONFIG)
    wide = "moe" if config.value("n_routed_experts") else "mlp"
    return ["attention" if n else wide if width else "mamba" for n, width in zip(heads, widths, strict=True)]


def _width(config: Config) -> int:
    if not config.prefix:
        return config.size("intermediate_size")
    widths = {width for width in config.sequence("intermediate_size") if width}
    if len(widths) > 1 or not all(type(width) is int and 0 < width <= 1 << 28 for width in widths):
        raise config.error(f"intermediate_size {sorted(map(str, widths))!r:.80} is not one width", USE_ITS_CONFIG)
    return min(widths, default=1)


_LAYER = "backbone.layers.{i}."
_NAMES = {
    **state_names("mixer", "backbone"),
    "final_norm": "backbone.norm_f.weight",
    "embed": "backbone.embeddings.weight",
    **dict.fromkeys(("attn_norm", "mlp_norm"), _LAYER + "norm.weight"),
    **module_names(_LAYER + "mixer.", {name: f"{name}_proj" for name in ("q", "k", "v", "o", "up", "down")}),
    "router": _LAYER + "mixer.gate.weight",
    "router_bias": _LAYER + "mixer.gate.e_score_correction_bias",
    "latent_in": _LAYER + "mixer.fc1_latent_proj.weight",
    "latent_out": _LAYER + "mixer.fc2_latent_proj.weight",
    **{f"experts.{name}": f"{_LAYER}mixer.experts.{{e}}.{name}_proj.weight" for name in ("up", "down")},
    **module_names(_LAYER + "mixer.shared_experts.", {f"shared.{name}": f"{name}_proj" for name in ("up", "down")}),
}
_OF_EXPERTS = (
    Key("n_routed_experts", 8, gguf="expert_count", kind=int),
    Key("num_experts_per_tok", 2, gguf="expert_used_count", kind=int),
    Key("moe_intermediate_size", 7688, gguf="expert_feed_forward_length", kind=int),
    Key("moe_shared_expert_intermediate_size", 7688, gguf="expert_shared_feed_forward_length", kind=int),
    Key("n_shared_experts", 1, gguf="expert_shared_count", kind=int),
    Key("moe_latent_size", gguf="moe_latent_size", kind=int),
    Key("n_group", 1, gguf="expert_group_count", gguf_default=1),
    Key("topk_group", 1, gguf="expert_group_used_count", gguf_default=1),
    Key("norm_topk_prob", True, gguf="expert_weights_norm", gguf_default=True),
    Key("routed_scaling_factor", 1.0, gguf="expert_weights_scale", gguf_default=1.0),
    Key("moe_shared_expert_overlap", kind=bool),
)
"""Keys of layers with experts."""
_KEYS = (
    *(only("sliding_window", None), Key("num_nextn_predict_layers", 0), Key("time_step_min", 0.001)),
    only("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    *(key for key in DECODER if key.name not in ("num_hidden_layers", "rms_norm_eps")),
    *(*_OF_EXPERTS, Key("expand", kind=int)),
    Key("num_hidden_layers", gguf="block_count", kind=int),
    *(Key("mlp_bias", False), Key("use_bias", False), only("mamba_proj_bias", False)),
    Key("num_key_value_heads", 8, gguf="attention.head_count_kv", kind=object),
    Key("intermediate_size", 21504, gguf="feed_forward_length", kind=object),
    Key("layer_norm_epsilon", 1e-5, gguf="attention.layer_norm_rms_epsilon", gguf_default=1e-5),
    *(Key("layers_block_type"), Key("hybrid_override_pattern", kind=str)),
    *(only("mlp_hidden_act", "relu2"), only("mamba_hidden_act", "silu", "swish")),
    Key("mamba_num_heads", 128, gguf="ssm.time_step_rank"),
    *(Key("mamba_head_dim", 64), Key("mamba_inner", gguf="ssm.inner_size", kind=int)),
    Key("n_groups", 8, gguf="ssm.group_count"),
    Key("ssm_state_size", 128, gguf="ssm.state_size"),
    Key("conv_kernel", 4, gguf="ssm.conv_kernel"),
    Key("use_conv_bias", True),
)
_ALIASES = {
    **LOCAL_ROUTED,
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
FAMILIES = {
    "nemotron_h": Family(
        "Nemotron-H: Mamba 2, attention, MLP and experts, a layer each",
        nemotron_h,
        table(_KEYS, head_dim=128),
        aliases=_ALIASES,
        names=_NAMES,
        renamed={"model.layers.": "backbone.layers."},
        fused=fused_mamba,
        constants=NO_EXPERT_BIASES,
        unused=("score.", "mtp."),
        gguf="nemotron_h",
        more_gguf=("nemotron_h_moe",),
        gguf_names={
            **STATE_NAMES_IN_GGUF,
            "mlp_norm": "blk.{i}.attn_norm.weight",
            "latent_in": "blk.{i}.ffn_latent_down.weight",
            "latent_out": "blk.{i}.ffn_latent_up.weight",
        },
    )
}
