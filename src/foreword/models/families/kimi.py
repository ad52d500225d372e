"""Kimi Linear and Ling 3.0: delta-nets with a decay for each channel of a key (Kimi Delta Attention), and latent
attention, with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import NEXT_TOKEN_HEADS, Family, decoder, layers_of, num_layers, part_of
from foreword.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    fused_latent_in_gguf,
    latent,
    latent_attention,
    latent_rope,
    latent_rows,
    latent_sizes,
    routed_experts,
    routed_keys,
    sparse_flags,
)
from foreword.models.families.states import STATE_NAMES_IN_GGUF, mixed_layers
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec, MoeSpec, RopeSpec


def kimi_linear(config: Config) -> DecoderSpec:
    """Return the spec of Kimi Linear, whose attention rotates nothing. The gate and the decays of a delta-net are
    products of two matrices each.
    """
    part = part_of(config, "linear_attn_config", _DELTA_NET)

    def size(key: str, own: str) -> int:
        return config.size(key, most=_MOST) if part.value(own) is None else part.size(own, most=_MOST)

    heads = config.size("num_attention_heads") if config.prefix else size("linear_num_heads", "num_heads")
    dim, kernel = size("linear_head_dim", "head_dim"), size("linear_conv_kernel_dim", "short_conv_kernel_size")
    mla, moe = latent_sizes(config), routed_experts(config, _EXPERTS, is_sigmoid=True, grouped=True)
    listed = _listed(part, num_layers(config))
    attends = _attends(config, lambda i: listed[i] if listed else i > 0 and i % 4 == 0)
    return _decoder(config, "kimi_linear", attends, _delta_net(heads, dim, kernel, dim), None, moe, latent(mla))


def bailing_hybrid(config: Config) -> DecoderSpec:
    """Return the spec of Ling 3.0, whose attention has a gate for each head. The last layer of every group has
    attention.
    """
    own = zip(_OF_DELTA_NETS, ("num_attention_heads", "head_dim", "short_conv_kernel_size"), strict=True)
    sizes = (config.size(usual if config.value(key) is None else key, most=_MOST) for key, usual in own)
    recurrent = _delta_net(*sizes)
    if config.get("kda_safe_gate", bool):
        if (least := config.get("kda_lower_bound", float)) >= 0:
            raise config.error(f"{config.label('kda_lower_bound')} = {least} is not below zero", USE_ITS_CONFIG)
        recurrent = replace(recurrent, least_log=least)
    mla, moe = latent_sizes(config), routed_experts(config, _EXPERTS, is_sigmoid=True, grouped=True)
    shared = config.count("n_shared_experts") * config.size(_SHARED, moe.intermediate_size)
    moe, group = replace(moe, shared_intermediate_size=shared), config.size("layer_group_size")
    attends, rotary = _attends(config, lambda i: (i + 1) % group == 0), latent_rope(config, mla)
    differences = {**latent_attention(config, mla), "attn_gate": True, "head_gates": True}
    return _decoder(config, "bailing_hybrid", attends, recurrent, rotary, moe, differences)


def _decoder(
    config: Config,
    architecture: str,
    attends: list[bool],
    recurrent: RecurrentSpec,
    rotary: RopeSpec | None,
    moe: MoeSpec,
    differences: dict[str, Any],
) -> DecoderSpec:
    """Return a spec of layers of which those after the first dense ones have experts."""
    if not config.prefix:
        config.optional("num_key_value_heads", int)
    sparse = sparse_flags(config, config.count("first_k_dense_replace"))
    layers = mixed_layers(config, attends, None if all(attends) else recurrent, rotary)
    layers = tuple(replace(layer, moe=moe if has else None) for layer, has in zip(layers, sparse, strict=True))
    return decoder(config, architecture, layers, max_model_len=config.size("max_position_embeddings"), **differences)


def _delta_net(heads: int, dim: int, kernel: int, rank: int = 0) -> RecurrentSpec:
    return RecurrentSpec(
        "gated_delta", heads, heads, dim, dim, kernel, rank=rank, channel_decays=True, sigmoid_gate=True
    )


def _attends(config: Config, rule: Callable[[int], bool]) -> list[bool]:
    """Return whether each layer has attention. GGUF files have the number of key/value heads of each layer, 0 without;
    ``rule`` is for a config.json without ``layer_types``.
    """
    if config.prefix:
        heads = config.value("num_key_value_heads")
        count = num_layers(config)
        return [n != 0 for n in heads[:count]] if isinstance(heads, list) else [heads != 0] * count
    return [not linear for linear in layers_of(config, "linear_attention", lambda i: not rule(i))]


def _listed(part: Config, count: int) -> list[bool]:
    """Return whether each layer has attention by the two lists of a config.json, which count from 1; empty without
    them. Raise ModelError unless each layer is in one of them once.
    """
    full, linear = part.sequence("full_attn_layers"), part.sequence("kda_layers")
    if part.value("full_attn_layers") is None or part.value("kda_layers") is None:
        return []
    numbers = [*full, *linear]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != [*range(1, count + 1)]:
        reason = f"full_attn_layers and kda_layers are not the numbers 1 to {count}, each in one of them"
        raise part.error(reason, USE_ITS_CONFIG)
    return [i + 1 in full for i in range(count)]


_MOST = 1 << 14
_SHARED = "moe_shared_expert_intermediate_size"
_DELTA_NET = table(
    (Key(name, kind=int) for name in ("head_dim", "num_heads", "short_conv_kernel_size")),
    (Key(name, kind=list) for name in ("full_attn_layers", "kda_layers")),
)
_EXPERTS, _LOCAL = {"n_routed_experts": "num_experts"}, {"num_local_experts": "num_experts"}
_OWN = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_KEYS = tuple(
    replace(key, own=_OWN.get(key.name, ""), is_alias=key.name in _OWN)
    for key in (
        *(*LATENT_KEYS, *routed_keys(_EXPERTS), Key("layer_types"), Key("mlp_layer_types")),
        Key("num_key_value_heads", gguf="attention.head_count_kv", kind=object),
        *(only("hidden_act", "silu", "swish"), only_in_gguf("expert_gating_func", 2)),
    )
)
_OF_DELTA_NETS = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
"""The sizes of delta-nets. Published configurations of Ling 3.0 have keys of attention in their place."""
_NOT_ROTATED = (
    *(Key("partial_rotary_factor", kind=float), Key("original_max_position_embeddings", kind=int)),
    Key("rope_theta", kind=float, gguf="rope.freq_base"),
    *(Key(name, kind=dict) for name in ("rope_scaling", "rope_parameters")),
)
"""The keys of a rotary embedding, where there is none."""
_ATTN = "model.layers.{i}.self_attn."
_NAMES = {
    **LATENT_NAMES,
    **{f"state.{name}": f"{_ATTN}{name}_proj.weight" for name in "qkvo"},
    "state.beta": _ATTN + "b_proj.weight",
    "state.conv": _ATTN + "conv1d.weight",
    "state.dt_bias": _ATTN + "dt_bias",
    "state.a_log": _ATTN + "A_log",
    "state.norm": _ATTN + "o_norm.weight",
}
_RENAMED = {".attention.": ".self_attn.", ".self_attn.forget_gate.": ".self_attn."}
_CONV = {".self_attn.conv1d.weight": tuple(f".self_attn.{name}_conv1d.weight" for name in "qkv")}
_CONV_IN_GGUF = {".ssm_conv1d.weight": tuple(f".ssm_conv1d_{name}.weight" for name in "qkv")}
_IN_GGUF = {
    **STATE_NAMES_IN_GGUF,
    **{f"state.{name}": f"blk.{{i}}.attn_{name}.weight" for name in "qkv"},
    "state.o": "blk.{i}.attn_output.weight",
    "state.beta": "blk.{i}.ssm_beta.weight",
}
_LOW_PARTS = {
    f"state.{own}": (f"{part}_proj", f"ssm_{part}")
    for own, part in (("z_low", "g_a"), ("z", "g_b"), ("dt_low", "f_a"), ("dt", "f_b"))
}
"""Weights of products of two matrices: their names in safetensors and in GGUF files."""
FAMILIES = {
    "kimi_linear": Family(
        "Kimi Linear: delta-nets with decays by channel, and latent attention",
        kimi_linear,
        table(
            *(_KEYS, _NOT_ROTATED, [Key("linear_attn_config", kind=dict), only("mla_use_nope", True)]),
            [Key("linear_num_heads", 32)],
            [
                Key("linear_head_dim", 128, gguf="kda.head_dim"),
                Key("linear_conv_kernel_dim", 4, gguf="ssm.conv_kernel"),
            ],
            [only("moe_router_activation_func", "sigmoid"), only("moe_layer_freq", 1), only("use_grouped_topk", True)],
            [Key("norm_topk_prob", True, own="moe_renormalize", is_alias=True)],  # GGUF files do not say it
            [only("num_nextn_predict_layers", 0)],
            rms_norm_eps=1e-5,
            q_lora_rank=None,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=1024,
            routed_scaling_factor=2.446,
        ),
        aliases=_LOCAL,
        names={**_NAMES, **{name: f"{_ATTN}{part}.weight" for name, (part, _) in _LOW_PARTS.items()}},
        renamed={
            **_RENAMED,
            ".block_sparse_moe.": ".mlp.",
            ".w1.": ".gate_proj.",
            ".w2.": ".down_proj.",
            ".w3.": ".up_proj.",
        },
        joined=_CONV,
        fused=latent_rows,
        gguf="kimi-linear",
        gguf_names={**_IN_GGUF, **{name: f"blk.{{i}}.{part}.weight" for name, (_, part) in _LOW_PARTS.items()}},
        gguf_joined=_CONV_IN_GGUF,
        gguf_fused=fused_latent_in_gguf,
    ),
    "bailing_hybrid": Family(
        "Ling 3.0: delta-nets with decays by channel, and latent attention",
        bailing_hybrid,
        table(
            *(_KEYS, NEXT_TOKEN_HEADS, [Key("head_dim", 128, gguf="kda.head_dim")]),
            (Key(name, kind=int) for name in _OF_DELTA_NETS),
            (only_in_gguf(f"swiglu_clamp_{name}", None) for name in ("exp", "shexp")),
            [Key("short_conv_kernel_size", 4, gguf="ssm.conv_kernel"), Key("layer_group_size", 6)],
            [Key("kda_safe_gate", True, gguf="kda.safe_gate", gguf_default=True)],
            [Key("kda_lower_bound", -5.0, gguf="kda.gate_lower_bound"), Key("num_nextn_predict_layers", 1, kind=int)],
            [Key(_SHARED, gguf="expert_shared_feed_forward_length", kind=int), Key("rotary_dim", kind=int)],
            [only("no_kda_lora", True), only("use_kda_lora", False), only("use_mla_nope", False)],
            [only("linear_attention", "kda"), only("gated_attention_proj_granularity_type", "head_wise")],
            [only("expert_swiglu_limit_list", None), only("share_expert_swiglu_limit_list", None)],
            [only("score_function", "sigmoid"), only("moe_router_enable_expert_bias", True)],
            [only("rope_interleave", True), only("scale_router_input", False), only("use_qk_norm", True)],
            [only("use_qkv_bias", False), only("use_bias", False), only("mtp_use_kda", False)],
            q_lora_rank=None,
            rope_theta=6e6,
            first_k_dense_replace=2,
            n_group=8,
            topk_group=4,
            n_shared_experts=1,
            num_experts=512,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            routed_scaling_factor=2.5,
        ),
        aliases={**_LOCAL, "num_mtp_layers": "num_nextn_predict_layers"},
        names={
            **_NAMES,
            "state.dt": _ATTN + "f_proj.weight",
            **dict.fromkeys(("state.z", "attn_gate"), _ATTN + "g_proj.weight"),
            "embed": "model.word_embeddings.weight",
        },
        renamed={
            **_RENAMED,
            ".self_attn.dense.": ".self_attn.o_proj.",
            "model.embed_tokens.": "model.word_embeddings.",
            ".gate.expert_bias": ".gate.e_score_correction_bias",
        },
        joined=_CONV,
        interleaved=True,
        fused=latent_rows,
        gguf="bailingmoe3",
        gguf_names={
            **_IN_GGUF,
            "state.dt": "blk.{i}.ssm_f_a.weight",
            "state.z": "blk.{i}.ssm_g_a.weight",
            "attn_gate": "blk.{i}.attn_gate.weight",
        },
        gguf_joined=_CONV_IN_GGUF,
        gguf_fused=fused_latent_in_gguf,
        gguf_interleaved=True,
    ),
}
