"""Hunyuan of 2025: queries and keys are normalised after their rotation. With experts: one that every token uses."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    LOCAL_EXPERTS,
    Family,
    check_groups,
    decoder,
    head_dim,
    normed_after_rotation,
    num_layers,
    rope,
)
from foreword.models.keys import Key, of_gguf, table
from foreword.models.rope import rope_parameters
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec


def hunyuan(config: Config) -> DecoderSpec:
    return _decoder(config, "hunyuan_v1_dense", (_layer(config),) * num_layers(config))


def hunyuan_moe(config: Config) -> DecoderSpec:
    """Return a spec whose experts, and the shared one, are as wide as an MLP. ``moe_topk`` may list the experts per
    token of each layer.
    """
    count, inner, chosen = num_layers(config), config.size("intermediate_size"), config.value("moe_topk")
    chosen = chosen if isinstance(chosen, list) else [config.size("moe_topk")] * count
    if len(chosen) != count or not all(type(one) is int and one > 0 for one in chosen):
        raise config.error(f"moe_topk {chosen!r:.80} is not {count} numbers of experts", USE_ITS_CONFIG)
    wide = config.size(_WIDTH, inner)
    shared = config.size(_SHARED, inner)
    layer, layers = _layer(config), []
    for one in chosen:
        moe = MoeSpec(config.size("num_experts"), one, wide, shared_intermediate_size=shared, shared_gate=False)
        check_groups(config, moe)
        layers.append(replace(layer, moe=moe))
    return _decoder(config, "hunyuan_v1_moe", tuple(layers))


def _layer(config: Config) -> LayerSpec:
    return normed_after_rotation(rope(_stretched(config)), config.positive("rms_norm_eps"))


def _decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    return decoder(config, architecture, layers, qk_scales=True)


def _stretched(config: Config) -> Config:
    """Return the config with the rotary base that ``alpha`` stretches, where the type is dynamic."""
    own = rope_parameters(config)
    if own.get("rope_type") != "dynamic" or not own.get("alpha"):
        return config
    dim, rules = head_dim(config), Config(config.path, own)
    alpha = rules.positive("alpha")
    if dim <= 2:
        raise config.error(f"alpha = {alpha} with heads of {dim} dimensions", USE_ITS_CONFIG)
    theta = rules.positive("rope_theta") * alpha ** (dim / (dim - 2))
    default = {"rope_type": "default", "rope_theta": theta}
    return config.with_values({"rope_parameters": default, "rope_scaling": None})


_WIDTH, _SHARED = "*.expert_feed_forward_length", "*.expert_shared_feed_forward_length"
_LAYER, _MLP = "model.layers.{i}.", "model.layers.{i}.mlp."
_KEYS = (*DECODER, HIDDEN_ACT, *ATTENTION_BIAS)
_NAMES = {"q_norm": _LAYER + "self_attn.query_layernorm.weight", "k_norm": _LAYER + "self_attn.key_layernorm.weight"}
FAMILIES = {
    "hunyuan_v1_dense": Family(
        "Hunyuan (2025)", hunyuan, table(_KEYS, rms_norm_eps=1e-5), names=_NAMES, gguf="hunyuan-dense"
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan (2025) with experts",
        hunyuan_moe,
        table(
            _KEYS,
            [
                Key("num_experts", 1, gguf="expert_count"),
                Key("moe_topk", 1, gguf="expert_used_count", kind=object),
                *(of_gguf(name, kind=int) for name in (_WIDTH, _SHARED)),
            ],
            rms_norm_eps=1e-5,
        ),
        aliases={**LOCAL_EXPERTS, "num_experts_per_tok": "moe_topk"},
        names={
            **_NAMES,
            "router": _MLP + "gate.wg.weight",
            **{f"shared.{name}": f"{_MLP}shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        },
        gguf="hunyuan-moe",
    ),
}
