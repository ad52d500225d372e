"""Nemotron-H: layers that are Mamba 2, attention without rotation, or an MLP of squared ReLU, each alone."""

from __future__ import annotations

import math

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, Family, decoder, num_layers, rope
from foreword.models.families.mamba import fused_mamba
from foreword.models.families.states import STATE_NAMES_IN_GGUF, check_state, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec, LayerSpec

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "linear_attention": "mamba", "full_attention": "attention"}
"""Other names of the kinds of layers: in ``hybrid_override_pattern``, and in configurations of transformers 5."""


def nemotron_h(config: Config) -> DecoderSpec:
    kinds = _kinds_in_gguf(config) if config.prefix else _kinds(config)
    if not kinds or not set(kinds) <= {"mamba", "attention", "mlp"}:
        reason = f"layers {kinds!r:.80} are not of mamba, attention and mlp"
        raise config.error(reason, "Use a model with layers of these kinds")
    if (count := config.optional("num_hidden_layers", int)) not in (None, len(kinds)):
        raise config.error(f"num_hidden_layers = {count}, but {len(kinds)} kinds are given", USE_ITS_CONFIG)
    if "attention" not in kinds or "mamba" not in kinds:
        raise config.error("the model has not both mamba and attention layers", "Use a model that has both")
    if not config.prefix and config.get("tie_word_embeddings", bool):
        reason = "tie_word_embeddings = True, while the head of this family is a tensor of its own"
        raise config.error(reason, "Use a model with tie_word_embeddings = False")
    heads = config.size("mamba_num_heads")
    inner = config.size("mamba_inner", heads * config.size("mamba_head_dim"))  # of a GGUF file
    recurrent = RecurrentSpec(
        "mamba2",
        num_heads=heads,
        num_key_heads=config.size("n_groups"),
        key_dim=config.size("ssm_state_size"),
        value_dim=max(1, inner // heads),
        conv_kernel=config.size("conv_kernel", most=1 << 8),
        conv_bias=config.get("use_conv_bias", bool),
    )
    check_state(config, recurrent)
    layer = {
        "mamba": LayerSpec(None, recurrent=recurrent, has_mlp=False),
        "attention": LayerSpec(None, has_mlp=False),
        "mlp": LayerSpec(None, has_mixer=False),
    }
    for name in (*(key.name for key in _OF_EXPERTS), "expand"):  # without effect: the heads have widths
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
    )


def _kinds(config: Config) -> list[str]:
    pattern = config.optional("hybrid_override_pattern", str)
    if pattern is not None and not (pattern and set(pattern) <= {"M", "*", "-", "E"}):
        raise config.error(f"hybrid_override_pattern {pattern!r:.80} is not of M, *, - and E", USE_ITS_CONFIG)
    listed = config.sequence("layers_block_type") or pattern or ""
    return [_KINDS.get(str(kind), str(kind)) for kind in listed]


def _kinds_in_gguf(config: Config) -> list[str]:
    """A layer with key/value heads has attention, one with a width an MLP."""
    heads, widths = config.sequence("num_key_value_heads"), config.sequence("intermediate_size")
    if not len(heads) == len(widths) == num_layers(config):
        reason = "num_key_value_heads and intermediate_size are not lists of one number per layer"
        raise config.error(reason, USE_ITS_CONFIG)
    return ["attention" if n else "mlp" if width else "mamba" for n, width in zip(heads, widths, strict=True)]


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
    **{name: f"{_LAYER}mixer.{name}_proj.weight" for name in ("q", "k", "v", "o", "up", "down")},
}
_OF_EXPERTS = (
    *(Key(name, kind=int) for name in ("moe_intermediate_size", "moe_latent_size", "n_group", "n_routed_experts")),
    *(Key(name, kind=int) for name in ("moe_shared_expert_intermediate_size", "n_shared_experts", "topk_group")),
    *(Key(name, kind=bool) for name in ("moe_shared_expert_overlap", "norm_topk_prob")),
    *(Key("num_experts_per_tok", gguf="expert_used_count", kind=int), Key("routed_scaling_factor", kind=float)),
)
"""Keys of layers with experts, which are refused."""
_KEYS = (
    *(only("sliding_window", None), only("num_nextn_predict_layers", 0)),
    only("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    *(key for key in DECODER if key.name not in ("num_hidden_layers", "rms_norm_eps")),
    *(*_OF_EXPERTS, Key("expand", kind=int)),
    Key("num_hidden_layers", gguf="block_count", kind=int),
    *(only(name, False) for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
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
FAMILIES = {
    "nemotron_h": Family(
        "Nemotron-H: Mamba 2, attention and MLP layers",
        nemotron_h,
        table(_KEYS, head_dim=128),
        names=_NAMES,
        fused=fused_mamba,
        unused=("score.", "mtp."),
        gguf="nemotron_h",
        gguf_names={**STATE_NAMES_IN_GGUF, "mlp_norm": "blk.{i}.attn_norm.weight"},
    )
}
