"""Decoders of recurrent and attention layers: Bamba (Mamba 2) and Qwen3-Next (gated delta-net)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    BIASES,
    DECODER,
    EXPERTS,
    SHARED_EXPERT,
    SPARSE_LAYERS,
    Family,
    Rows,
    decoder,
    experts,
    layers_of,
    num_layers,
    rope,
    sparse_layers,
)
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec


def bamba(config: Config) -> DecoderSpec:
    """The layers of ``attn_layer_indices`` have attention, which rotates half of each head; the others are Mamba 2."""
    heads, inner = config.size("mamba_n_heads"), config.size("mamba_expand") * config.size("hidden_size")
    head = config.value("mamba_d_head")
    recurrent = RecurrentSpec(
        "mamba2",
        num_heads=heads,
        num_key_heads=config.size("mamba_n_groups"),
        key_dim=config.size("mamba_d_state"),
        value_dim=max(1, inner // heads) if head in (None, "auto") else config.size("mamba_d_head"),
        conv_kernel=config.size("mamba_d_conv", most=1 << 8),
        conv_bias=config.get("mamba_conv_bias", bool),
    )
    if recurrent.num_values != inner:
        reason = f"{heads} heads of mamba_d_head = {recurrent.value_dim} are not mamba_expand * hidden_size = {inner}"
        raise config.error(reason, USE_ITS_CONFIG)
    attends = config.indices("attn_layer_indices", count := num_layers(config))
    return decoder(config, "bamba", _layers(config, [i in attends for i in range(count)], recurrent))


def qwen3_next(config: Config) -> DecoderSpec:
    """Every fourth layer has attention with an output gate, which rotates a quarter of each head; the others are gated
    delta-nets. Experts as in Qwen2-MoE.
    """
    heads = config.size("linear_num_value_heads")
    value_dim = config.size("linear_num_values", 128 * heads) // heads  # of a GGUF file
    recurrent = RecurrentSpec(
        "gated_delta",
        num_heads=heads,
        num_key_heads=config.size("linear_num_key_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim", value_dim),
        conv_kernel=config.size("linear_conv_kernel_dim", most=1 << 8),
    )
    every = config.size("full_attention_interval")
    is_recurrent = layers_of(config, "linear_attention", lambda i: (i + 1) % every > 0)
    layers = _layers(config, [not linear for linear in is_recurrent], recurrent)
    sparse = sparse_layers(config, experts(config, shared=True))
    layers = tuple(replace(layer, moe=moe) for layer, moe in zip(layers, sparse, strict=True))
    return decoder(config, "qwen3_next", layers, qk_norm=True, attn_gate=True)


def _layers(config: Config, attends: list[bool], recurrent: RecurrentSpec) -> tuple[LayerSpec, ...]:
    """Return layers with attention where ``attends``. ModelError if all are of one kind, or sizes do not fit."""
    if recurrent.num_heads % recurrent.num_key_heads:
        reason = f"{recurrent.num_heads} recurrent heads are not a multiple of {recurrent.num_key_heads} key heads"
        raise config.error(reason, USE_ITS_CONFIG)
    if recurrent.state_size > 1 << 28:
        raise config.error(f"a recurrent layer has a state of {recurrent.state_size} numbers", USE_ITS_CONFIG)
    if all(attends) or not any(attends):
        kind = "attention" if all(attends) else "recurrent"
        raise config.error(f"all layers are {kind} layers", "Use a model that has both kinds")
    attention = LayerSpec(rope(config))
    return tuple(attention if attend else LayerSpec(None, recurrent=recurrent) for attend in attends)


def _fused_bamba(spec: DecoderSpec) -> Mapping[str, Rows]:
    """in_proj stacks z, v, k, q and dt."""
    recurrent = _recurrent_of(spec)
    sizes = [("z", recurrent.num_values), *recurrent.parts, ("dt", recurrent.num_heads)]
    return _stacked("in_proj", sizes)


def _fused_qwen3_next(spec: DecoderSpec) -> Mapping[str, Rows]:
    """By key head, in_proj_qkvz stacks q, k, v, z and in_proj_ba beta, dt; by head, q_proj stacks q and the gate."""
    recurrent = _recurrent_of(spec)
    per_key = recurrent.num_heads // recurrent.num_key_heads
    values = per_key * recurrent.value_dim
    qkvz = [("q", recurrent.key_dim), ("k", recurrent.key_dim), ("v", values), ("z", values)]
    return {
        **_stacked("in_proj_qkvz", qkvz, repeats=True),
        **_stacked("in_proj_ba", [("beta", per_key), ("dt", per_key)], repeats=True),
        "q": Rows("q_proj", 0, spec.head_dim, 2 * spec.head_dim),
        "attn_gate": Rows("q_proj", spec.head_dim, 2 * spec.head_dim, 2 * spec.head_dim),
    }


def _qwen3_next_in_gguf(spec: DecoderSpec) -> Mapping[str, Rows]:
    """attn_qkv stacks q, k and v of the whole layer; ssm_ba and attn_q are as in a directory."""
    own = _fused_qwen3_next(spec)
    stacked = _stacked("qkv", list(_recurrent_of(spec).parts))
    return {**{name: rows for name, rows in own.items() if rows.name != "in_proj_qkvz"}, **stacked}


def _recurrent_of(spec: DecoderSpec) -> RecurrentSpec:
    return next(layer.recurrent for layer in spec.layers if layer.recurrent)


def _stacked(source: str, sizes: list[tuple[str, int]], *, repeats: bool = False) -> dict[str, Rows]:
    """Weights of a recurrent layer with these numbers of rows, in this order in ``source``."""
    ends = [sum(size for _, size in sizes[: i + 1]) for i in range(len(sizes))]
    period = ends[-1] if repeats else None
    return {
        f"state.{name}": Rows(source, end - size, end, period) for (name, size), end in zip(sizes, ends, strict=True)
    }


def _names(module: str) -> dict[str, str]:
    layer = f"model.layers.{{i}}.{module}."
    return {
        "state.conv": layer + "conv1d.weight",
        "state.conv_bias": layer + "conv1d.bias",
        "state.dt_bias": layer + "dt_bias",
        "state.a_log": layer + "A_log",
        "state.skip": layer + "D",
        "state.norm": layer + "norm.weight",
        "state.o": layer + "out_proj.weight",
        **{name: f"{layer}{name}.weight" for name in ("in_proj", "in_proj_qkvz", "in_proj_ba")},
    }


NOT_IN_GGUF = {"granitehybrid": "Bamba"}
"""Architectures of GGUF files whose models are read from directories alone."""

# The activation is that of the recurrent layers, too.
_COMMON = (*DECODER, *BIASES, PARTIAL_ROTARY, only("hidden_act", "silu", "swish"))
_BAMBA = (
    *(
        Key("attn_layer_indices"),
        Key("mamba_n_heads", 128),
        Key("mamba_expand", 2),
        Key("mamba_d_head", 64, kind=object),
    ),
    *(Key("mamba_n_groups", 1), Key("mamba_d_state", 256), Key("mamba_d_conv", 4), Key("mamba_conv_bias", True)),
    only("mamba_proj_bias", False),
    only("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
)
_QWEN3_NEXT = (
    Key("layer_types"),
    Key("full_attention_interval", 4, gguf="full_attention_interval", gguf_default=4),
    Key("linear_num_value_heads", 32, gguf="ssm.time_step_rank"),
    Key("linear_num_key_heads", 16, gguf="ssm.group_count"),
    Key("linear_key_head_dim", 128, gguf="ssm.state_size"),
    Key("linear_value_head_dim"),
    Key("linear_num_values", gguf="ssm.inner_size"),
    Key("linear_conv_kernel_dim", 4, gguf="ssm.conv_kernel"),
)
FAMILIES = {
    "bamba": Family(
        "Bamba: Mamba 2 and attention layers",
        bamba,
        table(_COMMON, _BAMBA, num_key_value_heads=8, rms_norm_eps=1e-5, partial_rotary_factor=0.5),
        names={
            **_names("mamba"),
            "mlp_norm": "model.layers.{i}.pre_ff_layernorm.weight",
            "final_norm": "model.final_layernorm.weight",
            **{name: f"model.layers.{{i}}.feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")},
        },
        fused=_fused_bamba,
    ),
    "qwen3_next": Family(
        "Qwen3-Next: gated delta-net and attention layers",
        qwen3_next,
        table(
            *(_COMMON, EXPERTS, SPARSE_LAYERS, [SHARED_EXPERT], _QWEN3_NEXT),
            num_key_value_heads=2,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            head_dim=256,
            partial_rotary_factor=0.25,
        ),
        names={**_names("linear_attn"), "q_proj": "model.layers.{i}.self_attn.q_proj.weight"},
        unused=("score.", "mtp."),
        norms_less_one=True,
        gguf="qwen3next",
        gguf_names={
            "q_proj": "blk.{i}.attn_q.weight",
            "mlp_norm": "blk.{i}.post_attention_norm.weight",
            "in_proj_ba": "blk.{i}.ssm_ba.weight",
            "state.z": "blk.{i}.attn_gate.weight",
            "state.conv": "blk.{i}.ssm_conv1d.weight",
            "state.dt_bias": "blk.{i}.ssm_dt.bias",
            "state.a_log": "blk.{i}.ssm_a",
            "state.norm": "blk.{i}.ssm_norm.weight",
            "state.o": "blk.{i}.ssm_out.weight",
        },
        fused=_fused_qwen3_next,
        gguf_fused=_qwen3_next_in_gguf,
    ),
}
