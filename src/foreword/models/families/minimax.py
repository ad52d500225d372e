"""MiniMax M2: norms of the queries and of the keys of all heads together, and a sigmoid router with a bias. MiniMax
Text 01: layers with lightning attention, whose states decay by numbers that no token changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from foreword.arrays import F32
from foreword.models.config import Config
from foreword.models.families.base import (
    DECODER,
    HIDDEN_ACT,
    NORMED_EXPERTS,
    SPARSE_MOE,
    SPARSE_MOE_NAMES,
    SPARSE_MOE_RENAMED,
    WINDOWS,
    Family,
    Rows,
    decoder,
    experts,
    has_window,
    head_dim,
    layers_of,
    num_layers,
    rope,
)
from foreword.models.families.states import mixed_layers, recurrent_of, stacked
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec


def minimax_m2(config: Config) -> DecoderSpec:
    """Return a spec. ``rotary_dim`` is the rotary part of a head where the config has no partial_rotary_factor."""
    rotated = config.optional("rotary_dim", int)
    if rotated is not None and config.values.get(PARTIAL_ROTARY.name) is None:
        config = config.with_values({PARTIAL_ROTARY.name: rotated / head_dim(config)})
    moe = replace(experts(config), scoring="sigmoid", router_bias=True)
    layers = (LayerSpec(rope(config), moe=moe),) * num_layers(config)
    return decoder(config, "minimax_m2", layers, qk_norm=True, joint_qk_norm=True)


def minimax(config: Config) -> DecoderSpec:
    """Return the spec of MiniMax Text 01, where every second layer has lightning attention: a Mamba 2 without a
    convolution, with time steps of 1, a key head for each head, and rates that the layer's number gives. Mixers and
    experts add to multiples of their own inputs.
    """
    heads, dim = config.size("num_attention_heads"), head_dim(config)
    recurrent = RecurrentSpec(
        "mamba2", heads, heads, dim, dim, 1, normed="first", norm_eps=1e-6, sigmoid_gate=True, joint_norm=True
    )
    linear = layers_of(config, "linear_attention", lambda i: i % 2 == 1)
    layers = mixed_layers(config, [not one for one in linear], recurrent if any(linear) else None, rope(config))
    window = config.size("sliding_window") if has_window(config) else None
    alphas, betas = (
        {kind: config.positive(f"{kind}_{name}_factor") for kind in ("full_attn", "linear_attn", "mlp")}
        for name in ("alpha", "beta")
    )
    kinds = ("linear_attn" if one else "full_attn" for one in linear)
    moe = experts(config)
    return decoder(
        config,
        "minimax",
        tuple(
            replace(
                layer,
                sliding_window=window if layer.has_attention else None,
                moe=moe,
                mixer_scale=betas[kind],
                mlp_scale=betas["mlp"],
                kept=(alphas[kind], alphas["mlp"]),
            )
            for layer, kind in zip(layers, kinds, strict=True)
        ),
    )


def _fused(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of in_proj, which stacks q, k and v head by head."""
    recurrent = recurrent_of(spec)
    if recurrent is None:
        return {}
    return stacked("in_proj", [(name, recurrent.key_dim) for name in "qkv"], repeats=True)


def _rates(spec: DecoderSpec) -> Mapping[str, F32]:
    """Return the logarithms of the rates of the heads of each layer with lightning attention: those of slopes (ALiBi),
    times a factor that falls from 1 in the first layer to nearly 0 in the last one.
    """
    found, last = {}, spec.num_layers - 1 + 1e-5
    for i, layer in enumerate(spec.layers):
        if (recurrent := layer.recurrent) is not None:
            slopes = -8 * math.log(2) / recurrent.num_heads * np.arange(1, recurrent.num_heads + 1)
            found[f"layers.{i}.state.a_log"] = (slopes + math.log(1 - i / last + 1e-5)).astype(np.float32)
    return found


_ATTN = "model.layers.{i}.self_attn."
_STEP_OF_ONE = math.log(math.e - 1)
"""The number whose softplus is 1."""
FAMILIES = {
    "minimax": Family(
        "MiniMax Text 01: lightning attention and attention layers, with experts",
        minimax,
        table(
            (*DECODER, *WINDOWS, *NORMED_EXPERTS, only("hidden_act", "silu", "swish")),
            (
                Key(f"{kind}_{name}_factor", 1.0)
                for kind in ("full_attn", "linear_attn", "mlp")
                for name in ("alpha", "beta")
            ),
            [Key("block_size", kind=int)],  # in which the reference computes states
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        names={
            **SPARSE_MOE_NAMES,
            "in_proj": _ATTN + "in_proj.weight",
            "state.z": _ATTN + "output_gate.weight",
            "state.norm": _ATTN + "norm.weight",
            "state.o": _ATTN + "out_proj.weight",
        },
        # The usual meaning of this name is that all layers have it, for attention.
        renamed={".self_attn.qkv_proj.": ".self_attn.in_proj.", **SPARSE_MOE_RENAMED},
        constants={"state.conv": 1.0, "state.dt": 0.0, "state.dt_bias": _STEP_OF_ONE, "state.skip": 0.0},
        computed=_rates,
        fused=_fused,
    ),
    "minimax_m2": Family(
        "MiniMax M2",
        minimax_m2,
        table(
            (*DECODER, HIDDEN_ACT, PARTIAL_ROTARY, *NORMED_EXPERTS),
            [Key("rotary_dim", kind=int), only_in_gguf("expert_gating_func", 2, 0)],
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=5e6,
            num_experts_per_tok=8,
        ),
        names={**SPARSE_MOE_NAMES, "router_bias": SPARSE_MOE + "e_score_correction_bias"},
        renamed=SPARSE_MOE_RENAMED,
        gguf="minimax-m2",
    ),
}
