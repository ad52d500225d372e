"""Granite 3 and 4: Llama with multipliers; with experts; and with Mamba 2 layers, a shared expert without a gate."""

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
    WINDOWS,
    WITH_BIASES,
    Family,
    Rows,
    decoder,
    experts,
    head_dim,
    num_layers,
    rope,
    windows,
)
from foreword.models.families.mamba import MAMBA, fused_mamba, mamba2
from foreword.models.families.states import STATE_NAMES_IN_GGUF, mixed_layers, state_names
from foreword.models.keys import Key, only, table
from foreword.models.rope import rope_parameters, rope_spec
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec


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
    return decoder(config, "hyperclovax", layers, **differences)


def granite_moe(config: Config) -> DecoderSpec:
    layer = LayerSpec(rope(config), moe=_moe(config))
    return decoder(config, "granitemoe", (layer,) * num_layers(config), **_multipliers(config))


def granite_swa(config: Config) -> DecoderSpec:
    """Return the spec of Granite Swash, with attention sinks: every fourth layer from the first on has no window.

    ``layer_rope_theta`` has the rotary base of each layer; 0: it does not rotate.
    """
    count, of_all, thetas = num_layers(config), rope_parameters(config), config.sequence("layer_rope_theta")
    if config.value("layer_rope_theta") is None:
        thetas = [of_all["rope_theta"]] * count
    if len(thetas) != count or not all(type(theta) in (int, float) and 0 <= theta < math.inf for theta in thetas):
        raise config.error(f"layer_rope_theta {thetas!r:.80} is not {count} numbers from 0", USE_ITS_CONFIG)
    ropes = {theta: rope_spec(config, head_dim(config), {**of_all, "rope_theta": theta}) for theta in {*thetas} - {0}}
    spans = windows(config, lambda i: i % 4 != 0, is_optional=False)
    moe = _moe(config) if "num_local_experts" in config.keys else None
    each = zip(thetas, spans, strict=True)
    layers = tuple(LayerSpec(ropes.get(theta), span, moe, has_sinks=True) for theta, span in each)
    return decoder(config, "granite_swa", layers, **_multipliers(config))


def _moe(config: Config) -> MoeSpec:
    return replace(experts(config), shared_intermediate_size=config.count(_SHARED), shared_gate=False)


def granite_hybrid(config: Config) -> DecoderSpec:
    """Return a spec whose layers have attention or Mamba 2. Without experts the shared expert is the MLP.

    Attention rotates if ``position_embedding_type`` says so, and in a GGUF file if the scaling is "finetuned".
    """
    count, inner = num_layers(config), config.size("intermediate_size")
    has_shared = not config.value("num_local_experts") or config.value(_SHARED) != 0
    inner = config.size(_SHARED, inner) if has_shared else inner
    heads, types = config.value("num_key_value_heads"), config.sequence("layer_types")
    if isinstance(heads, list):  # a number for each layer of a GGUF file
        attends = [one != 0 for one in heads]
    elif config.value("layer_types") is None:
        attends = [False] * count
    else:
        attends = [one in ("attention", "full_attention") for one in types]
    if config.prefix:
        rotates = rope_parameters(config).get("finetuned") is True
    else:
        rotates = config.value("position_embedding_type") == "rope"
    rotary = rope(config) if rotates else None
    layers = mixed_layers(config, attends, mamba2(config) if not all(attends) else None, rotary)
    if config.value("num_local_experts"):
        moe = replace(experts(config), shared_intermediate_size=has_shared * inner, shared_gate=False)
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
        **fused_mamba(spec),
    }


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
_RENAMED_EXPERTS = {
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
}
_MLP = "model.layers.{i}.shared_mlp."
_SHARED_NAMES = {
    "gate_up": _MLP + "input_linear.weight",
    **dict.fromkeys(("down", "shared.down"), _MLP + "output_linear.weight"),
}
_COMMON = (
    *(*DECODER, HIDDEN_ACT, *ATTENTION_BIAS),
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
_SWASH = (*WINDOWS, Key("layer_rope_theta"))
_SINKS = {"sinks": "model.layers.{i}.self_attn.sinks"}
_SHARED_IN_GGUF = "expert_shared_feed_forward_length"
_HYBRID = (
    *(*MAMBA, Key("layer_types"), only("hidden_act", "silu", "swish")),
    Key("num_key_value_heads", gguf="attention.head_count_kv", kind=object),
    Key(_SHARED, 1024, gguf=_SHARED_IN_GGUF),
    Key("position_embedding_type", None, ("rope", "nope")),
)
FAMILIES = {
    "granite": Family(
        "Granite 3 and 4",
        granite,
        table(_COMMON, WITH_BIASES, [_shared_key(None)]),
        gguf="granite",
        gguf_interleaved=True,
    ),
    "hyperclovax": Family(
        "HyperCLOVA X SEED",
        hyperclovax,
        table(*(_COMMON, WITH_BIASES), [Key("use_post_norm", True), Key("attention_multiplier", kind=float)]),
        names={
            "post_attn_norm": "model.layers.{i}.post_norm1.weight",
            "post_mlp_norm": "model.layers.{i}.post_norm2.weight",
        },
    ),
    "granite_swa": Family(
        "Granite Swash",
        granite_swa,
        table(
            *(_COMMON, WITH_BIASES, _SWASH),
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            sliding_window=128,
        ),
        names=_SINKS,
    ),
    "granitemoe_swa": Family(
        "Granite Swash with experts",
        granite_swa,
        table(_COMMON, _EXPERTS, _SWASH, [_shared_key(0)], sliding_window=128),
        names={**_EXPERT_NAMES, **_SHARED_NAMES, **_SINKS},
        renamed=_RENAMED_EXPERTS,
        fused=_fused_hybrid,
    ),
    "granitemoe": Family(
        "Granite with experts",
        granite_moe,
        table(_COMMON, _EXPERTS, [_shared_key(0)]),
        names=_EXPERT_NAMES,
        renamed=_RENAMED_EXPERTS,
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
        renamed=_RENAMED_EXPERTS,
        fused=_fused_hybrid,
        gguf="granitemoe",
        gguf_interleaved=True,
        gguf_fused=lambda spec: {},
    ),
    "granitemoehybrid": Family(
        "Granite 4 H: Mamba 2 and attention layers, with or without experts",
        granite_hybrid,
        table(_COMMON, _EXPERTS, _HYBRID),
        aliases={"layers_block_type": "layer_types"},
        names={**_EXPERT_NAMES, **state_names("mamba"), **_SHARED_NAMES},
        renamed={**_RENAMED_EXPERTS, ".mlp.down_proj.": ".shared_mlp.output_linear."},
        fused=_fused_hybrid,
        gguf="granitehybrid",
        gguf_names=STATE_NAMES_IN_GGUF,
        gguf_interleaved=True,
        gguf_fused=fused_mamba,
    ),
}
