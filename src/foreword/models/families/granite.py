"""Granite 3 and 4: Llama with multipliers; with experts; and with Mamba 2 layers, a shared expert without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    BIASES,
    DECODER,
    EXPERTS,
    HIDDEN_ACT,
    WITH_BIASES,
    Family,
    Rows,
    biases,
    decoder,
    experts,
    head_dim,
    num_layers,
    rope,
)
from foreword.models.families.mamba import MAMBA, fused_mamba, mamba2
from foreword.models.families.states import STATE_NAMES_IN_GGUF, mixed_layers, state_names
from foreword.models.keys import Key, only, table
from foreword.models.rope import rope_parameters
from foreword.models.spec import DecoderSpec, LayerSpec


def granite(config: Config) -> DecoderSpec:
    """Return the spec of Granite 3, and of a Granite 4 of attention alone, whose MLP is its shared expert."""
    config.value(_SHARED)
    return decoder(config, "granite", (LayerSpec(rope(config)),) * num_layers(config), **_multipliers(config))


def hyperclovax(config: Config) -> DecoderSpec:
    """Return the spec of HyperCLOVA X SEED, which multiplies logits, and may have norms after attention and MLP."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    differences = {
        **_multipliers(config, usual=head_dim(config) ** -0.5),
        "logit_scale": config.positive("logits_scaling"),
        "post_norms": config.get("use_post_norm", bool),
    }
    return decoder(config, "hyperclovax", layers, **differences, **biases(config))


def granite_moe(config: Config) -> DecoderSpec:
    moe = replace(experts(config), shared_intermediate_size=config.get(_SHARED, int), shared_gate=False)
    layer = LayerSpec(rope(config), moe=moe)
    return decoder(config, "granitemoe", (layer,) * num_layers(config), **_multipliers(config))


def granite_hybrid(config: Config) -> DecoderSpec:
    """Return a spec whose layers have attention or Mamba 2. Without experts the shared expert is the MLP.

    Attention rotates if ``position_embedding_type`` says so, and in a GGUF file if the scaling is "finetuned".
    """
    count, inner = num_layers(config), config.size(_SHARED, config.size("intermediate_size"))
    heads, types = config.value("num_key_value_heads"), config.sequence("layer_types")
    if isinstance(heads, list):  # a number for each layer of a GGUF file
        attends = [one != 0 for one in heads]
    else:
        attends = [one in ("attention", "full_attention") for one in types] if types else [False] * count
    if config.prefix:
        rotates = rope_parameters(config).get("finetuned") is True
    else:
        rotates = config.value("position_embedding_type") == "rope"
    rotary = rope(config) if rotates else None
    layers = mixed_layers(config, attends, mamba2(config) if not all(attends) else None, rotary)
    if config.value("num_local_experts"):
        moe = replace(experts(config), shared_intermediate_size=inner, shared_gate=False)
        layers = tuple(replace(layer, moe=moe) for layer in layers)
    return decoder(config, "granitehybrid", layers, intermediate_size=inner, **_multipliers(config))


def _multipliers(config: Config, usual: float | None = None) -> dict[str, Any]:
    """Return the factors of a config. usual: that of queries where a config.json has none. GGUF files have the usual
    one.
    """
    usual = head_dim(config) ** -0.5 if config.prefix else usual
    return {
        "embedding_scale": config.positive("embedding_multiplier"),
        "residual_scale": config.positive("residual_multiplier"),
        "query_scale": config.positive("attention_multiplier", usual),
        "logit_scale": 1 / config.positive("logits_scaling"),
    }


def _fused_experts(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the fused weights: for each expert, input_linear stacks gate and up."""
    inner = next(layer.moe.intermediate_size for layer in spec.layers if layer.moe)
    return {"experts.gate": Rows("experts.gate_up", 0, inner), "experts.up": Rows("experts.gate_up", inner, 2 * inner)}


def _fused_hybrid(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of the experts, of the shared expert or MLP, and of in_proj of Mamba 2."""
    moe = spec.layers[0].moe
    inner = moe.shared_intermediate_size if moe else spec.intermediate_size
    part = "shared." if moe else ""
    return {
        f"{part}gate": Rows("gate_up", 0, inner),
        f"{part}up": Rows("gate_up", inner, 2 * inner),
        **(_fused_experts(spec) if moe else {}),
        **_fused_states(spec),
    }


def _fused_states(spec: DecoderSpec) -> Mapping[str, Rows]:
    return fused_mamba(spec) if spec.state_size else {}


def _shared_key(default: int | None) -> Key:
    return Key(_SHARED, default, gguf=_SHARED_IN_GGUF, gguf_default=default, kind=int)


def _multiplier(name: str, gguf: str) -> Key:
    return Key(name, 1.0, gguf=gguf, gguf_default=1.0)


_SHARED = "shared_intermediate_size"
_MOE = "model.layers.{i}.block_sparse_moe."
_EXPERT_NAMES = {
    "router": _MOE + "router.layer.weight",
    "experts.gate_up": _MOE + "input_linear.weight",
    "experts.down": _MOE + "output_linear.weight",
}
_MLP = "model.layers.{i}.shared_mlp."
_SHARED_NAMES = {
    "gate_up": _MLP + "input_linear.weight",
    **dict.fromkeys(("down", "shared.down"), _MLP + "output_linear.weight"),
}
_COMMON = (
    *(*DECODER, HIDDEN_ACT, *BIASES),
    _multiplier("embedding_multiplier", "embedding_scale"),
    _multiplier("residual_multiplier", "residual_scale"),
    _multiplier("logits_scaling", "logit_scale"),
    Key("attention_multiplier", 1.0, gguf="attention.scale"),
)
_EXPERTS = (
    *(key for key in EXPERTS if key.name not in ("num_experts", "moe_intermediate_size")),
    Key("num_experts", kind=int),
    Key("num_local_experts", 8, gguf="expert_count"),
    Key("moe_intermediate_size", kind=int),
    only("norm_topk_prob", True),
)
_SHARED_IN_GGUF = "expert_shared_feed_forward_length"
_HYBRID = (
    *(*MAMBA, Key("layer_types"), only("hidden_act", "silu", "swish")),
    Key("num_key_value_heads", gguf="attention.head_count_kv", kind=object),
    Key(_SHARED, 1024, gguf=_SHARED_IN_GGUF),
    Key("position_embedding_type", None, ("rope", "nope")),
)
FAMILIES = {
    "granite": Family(
        "Granite 3 and 4", granite, table(_COMMON, [_shared_key(None)]), gguf="granite", gguf_interleaved=True
    ),
    "hyperclovax": Family(
        "HyperCLOVA X SEED",
        hyperclovax,
        table(
            (key for key in _COMMON if key.name not in ("attention_bias", "mlp_bias", "use_bias")),
            [*WITH_BIASES, Key("use_post_norm", True), Key("attention_multiplier", kind=float)],
        ),
        names={
            "post_attn_norm": "model.layers.{i}.post_norm1.weight",
            "post_mlp_norm": "model.layers.{i}.post_norm2.weight",
        },
    ),
    "granitemoe": Family(
        "Granite with experts",
        granite_moe,
        table(_COMMON, _EXPERTS, [_shared_key(0)]),
        names=_EXPERT_NAMES,
        fused=_fused_experts,
        gguf="granitemoe",
        gguf_interleaved=True,
        gguf_fused=lambda spec: {},
    ),
    "granitemoeshared": Family(
        "Granite with experts and a shared one",
        granite_moe,
        table(_COMMON, _EXPERTS, [_shared_key(0)]),
        names={**_EXPERT_NAMES, **_SHARED_NAMES},
        fused=_fused_hybrid,
        gguf="granitemoe",
        gguf_interleaved=True,
        gguf_fused=lambda spec: {},
    ),
    "granitemoehybrid": Family(
        "Granite 4 H: Mamba 2 and attention layers, with or without experts",
        granite_hybrid,
        table(_COMMON, _EXPERTS, _HYBRID),
        names={**_EXPERT_NAMES, **state_names("mamba"), **_SHARED_NAMES},
        fused=_fused_hybrid,
        gguf="granitehybrid",
        gguf_names=STATE_NAMES_IN_GGUF,
        gguf_interleaved=True,
        gguf_fused=_fused_states,
    ),
}
