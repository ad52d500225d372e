"""Llama 4 (text): layers that attend in chunks and layers without rotation, experts whose inputs the router scales."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    Family,
    Rows,
    decoder,
    experts,
    layers_of,
    num_layers,
    rope,
)
from foreword.models.keys import Key, only_in_gguf, table
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec, QueryGrowth

_LARGE = 128
"""Experts of the model whose queries and keys have no norm, which a GGUF file does not tell."""


def llama4(config: Config) -> DecoderSpec:
    count = num_layers(config)
    rotates = _flags(config, count)
    chunks = layers_of(config, "chunked_attention", lambda i: rotates[i])
    chunk = config.size("attention_chunk_size") if any(chunks) else None
    moe = replace(
        experts(config),
        norm_topk=False,
        shared_intermediate_size=config.size("intermediate_size"),
        shared_gate=False,
        scoring="sigmoid",
        scales_inputs=True,
    )
    is_normed = moe.num_experts != _LARGE if config.prefix else config.get("use_qk_norm", bool)
    rotary, unit_eps = rope(config), None
    if is_normed:  # after the rotation, whose scale s so changes nothing but eps: s x / sqrt(s² mean(x²) + eps)
        unit_eps = config.positive("rms_norm_eps") / rotary.scale**2
        rotary = replace(rotary, scale=1.0)
    growth = None
    if config.value("attn_temperature_tuning"):
        growth = QueryGrowth(config.size("floor_scale"), config.get("attn_scale", float))
    layers = tuple(
        LayerSpec(
            rotary if rotates[i] else None,
            chunk if chunks[i] else None,
            own,
            chunked=chunks[i],
            unit_qk_eps=unit_eps if rotates[i] else None,
            query_growth=None if rotates[i] else growth,
        )
        for i, own in enumerate(_sparse(config, moe, count))
    )
    return decoder(config, "llama4", layers, intermediate_size=config.size("intermediate_size_mlp"))


def _flags(config: Config, count: int) -> list[bool]:
    """Return whether each layer rotates: ``no_rope_layers`` has 1 for layers that do; without it, every fourth layer
    does not.
    """
    every, listed = config.size("no_rope_layer_interval"), config.sequence("no_rope_layers")
    flags = listed or [int((i + 1) % every != 0) for i in range(count)]
    if len(flags) != count or not all(isinstance(flag, int) and flag in (0, 1) for flag in flags):
        raise config.error(f"no_rope_layers {flags!r:.80} is not {count} of 0 and 1", USE_ITS_CONFIG)
    return [bool(flag) for flag in flags]


def _sparse(config: Config, moe: MoeSpec, count: int) -> list[MoeSpec | None]:
    """Return the experts of each layer: ``moe_layers`` lists those that have them; else the last of every step has."""
    step, listed = config.size("interleave_moe_layer_step"), config.indices("moe_layers", count)
    if config.value("moe_layers") is None:
        listed = range(step - 1, count, step)
    return [moe if i in listed else None for i in range(count)]


_FEED = "model.layers.{i}.feed_forward."
_KEYS = (
    *(*DECODER, *ATTENTION_BIAS, HIDDEN_ACT),
    only_in_gguf("attention.sliding_window", None),
    *(only_in_gguf("attention.sliding_window_pattern", 4), only_in_gguf("rope.freq_base_swa", None)),
    Key("intermediate_size_mlp", 16384, gguf="feed_forward_length"),
    Key("intermediate_size", 8192, gguf="expert_feed_forward_length"),
    Key("num_local_experts", 16, gguf="expert_count"),
    *(Key(name, kind=int) for name in ("num_experts", "moe_intermediate_size")),
    Key("norm_topk_prob", False),
    Key("num_experts_per_tok", 1, gguf="expert_used_count"),
    *(Key("moe_layers"), Key("interleave_moe_layer_step", 1, gguf="interleave_moe_layer_step", gguf_default=1)),
    *(Key("layer_types"), Key("attention_chunk_size", 8192)),
    *(Key("no_rope_layers"), Key("no_rope_layer_interval", 4)),
    Key("use_qk_norm", True),
    Key("attn_temperature_tuning", True, (True, False, 4)),  # 4: as older files have it
    *(Key("floor_scale", 8192), Key("attn_scale", 0.1)),
)
FAMILIES = {
    "llama4_text": Family(
        "Llama 4 (text)",
        llama4,
        table(_KEYS, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5),
        names={
            "router": _FEED + "router.weight",
            "experts.gate_up": _FEED + "experts.gate_up_proj",
            "experts.down": _FEED + "experts.down_proj",
            **{name: f"{_FEED}{name}_proj.weight" for name in ("gate", "up", "down")},
            **{f"shared.{name}": f"{_FEED}shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
        },
        unused=("score.", "vision_model.", "multi_modal_projector."),
        interleaved=True,
        fused=lambda spec: _fused(spec),
        gguf="llama4",
        gguf_interleaved=True,
        gguf_fused=lambda spec: {},
        transposed_experts=True,
        peft_swaps_experts="from 0.19",
    )
}


def _fused(spec: DecoderSpec) -> dict[str, Rows]:
    """Return the fused weights: for each expert, gate and up are side by side."""
    inner = next((layer.moe.intermediate_size for layer in spec.layers if layer.moe), 0)
    return {"experts.gate": Rows("experts.gate_up", 0, inner), "experts.up": Rows("experts.gate_up", inner, 2 * inner)}
