"""MPT and DBRX, whose configurations have parts of their own for attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreword.models.alibi import alibi_slopes
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ACTIVATIONS,
    CLIP_QKV,
    LAYER_NORMED,
    LEARNED_POSITIONS,
    Family,
    check_groups,
    decoder,
    fused_rows,
    limit_of,
    module_names,
    num_layers,
    part_of,
    rope,
)
from foreword.models.families.gpt import OWN_EPS, gpt_decoder
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec


def mpt(config: Config) -> DecoderSpec:
    """Return a spec whose MLP has GELU. In GGUF files, what ``attn_config`` says stands beside the other keys."""
    own: dict[str, Any] = {"max_model_len": config.size("max_position_embeddings")}
    if config.prefix:
        most, own["clip_qkv"] = config.positive(_MOST), limit_of(config, "clip_qkv")
    else:
        attention = part_of(config, "attn_config", _ATTENTION)
        _refuse_outside(config, "clip_qkv")
        most = attention.positive("alibi_bias_max")
        own["clip_qkv"] = limit_of(attention, "clip_qkv") if attention.value("clip_qkv") else None
        if attention.value("softmax_scale") is not None:
            own["query_scale"] = attention.positive("softmax_scale")
    layers, slopes = (LayerSpec(None),) * num_layers(config), alibi_slopes(config.size("num_attention_heads"), most)
    return gpt_decoder(config, "mpt", layers, activation="gelu", slopes=slopes, **own)


def dbrx(config: Config) -> DecoderSpec:
    """Return a spec with experts in every layer. In GGUF files, what ``attn_config`` and ``ffn_config`` say stands
    beside the other keys.
    """
    own: dict[str, Any] = {}
    if config.prefix:
        experts, chosen, inner = (config.size(key) for key in (_COUNT, _CHOSEN, "intermediate_size"))
        moe = MoeSpec(experts, chosen, inner)
        own["clip_qkv"] = limit_of(config, "clip_qkv")
    else:
        attention, ffn = part_of(config, "attn_config", _DBRX_ATTENTION), part_of(config, "ffn_config", _FFN)
        config = _with_base(config, attention)
        _refuse_outside(config, "clip_qkv", "intermediate_size")
        own["clip_qkv"], own["num_kv_heads"] = limit_of(attention, "clip_qkv"), attention.size("kv_n_heads")
        if (given := config.value("num_key_value_heads")) not in (None, own["num_kv_heads"]):
            reason = f"attn_config: kv_n_heads = {own['num_kv_heads']}, num_key_value_heads = {given!r:.80}"
            raise config.error(reason, USE_ITS_CONFIG)
        if (given := ffn.value("hidden_size")) not in (None, config.size("hidden_size")):
            raise ffn.refused("hidden_size", given)
        inner, act = ffn.size("ffn_hidden_size"), ffn.value("ffn_act_fn")
        name = act.get("name") if isinstance(act, Mapping) and {*act} == {"name"} else act
        if act is not None and not (act != name and isinstance(name, str) and name in ACTIVATIONS):
            raise ffn.refused("ffn_act_fn", act)
        own["activation"] = "silu" if name is None else ACTIVATIONS[name]
        is_normed = ffn.value("moe_normalize_expert_weights") is not None
        moe = MoeSpec(ffn.size("moe_num_experts"), ffn.size("moe_top_k"), inner, norm_topk=is_normed)
    check_groups(config if config.prefix else ffn, moe)
    own |= {"layer_norm": True, "intermediate_size": inner}
    layers = (LayerSpec(rope(config), moe=moe),) * num_layers(config)
    return decoder(config, "dbrx", layers, act=None, eps=_EPS, **own)


def _refuse_outside(config: Config, *keys: str) -> None:
    """Raise ModelError for keys of GGUF files, whose values a config.json has in ``attn_config`` and ``ffn_config``."""
    for key in keys:
        if config.value(key) is not None:
            raise config.refused(key, config.value(key))


def _with_base(config: Config, attention: Config) -> Config:
    """Return the config with the base of its rotary embedding, which may stand in ``attn_config``. Raise ModelError if
    it is there and differs.
    """
    if attention.value("rope_theta") is None:
        return config
    base, others = attention.positive("rope_theta"), config.value("rope_parameters") or {}
    if isinstance(others, Mapping) and others.get("rope_theta") not in (None, base):
        reason = f"attn_config: rope_theta = {base}, rope_parameters: rope_theta = {others['rope_theta']!r:.80}"
        raise config.error(reason, USE_ITS_CONFIG)
    return config.with_values({"rope_theta": base})


_MOST = "*.attention.max_alibi_bias"
_ATTENTION = table(
    [only("alibi", True), only("alibi_bias_max", 8), Key("clip_qkv", kind=float), Key("softmax_scale", kind=float)],
    [only("attn_type", "multihead_attention"), only("prefix_lm", False), only("qk_ln", False)],
    [Key("attn_impl", kind=str), Key("attn_uses_sequence_id", kind=bool)],  # without sequence ids
)
_COUNT, _CHOSEN, _EPS = "*.expert_count", "*.expert_used_count", "*.attention.layer_norm_epsilon"
_DBRX_ATTENTION = table([Key("clip_qkv", kind=float), Key("kv_n_heads", 1), Key("rope_theta", kind=float)])
_FFN = table(
    [Key("ffn_hidden_size", 3584), Key("moe_num_experts", 4), Key("moe_top_k", 1), Key("hidden_size", kind=int)],
    [only("moe_normalize_expert_weights", 1.0), Key("ffn_act_fn", kind=dict)],
)
_LAYER = "transformer.blocks.{i}."
_SIZES = (
    Key("hidden_size", gguf="embedding_length", own="d_model", is_alias=True),
    Key("num_hidden_layers", gguf="block_count", own="n_layers", is_alias=True),
    Key("num_attention_heads", gguf="attention.head_count", own="n_heads", is_alias=True),
)
_EXPERTS = {"gate": "w1", "up": "v1", "down": "w2"}
_WITHOUT_BIASES = {f"{name}_norm_bias": 0.0 for name in ("attn", "mlp", "final")}
FAMILIES = {
    "mpt": Family(
        "MPT",
        mpt,
        table(
            *(LEARNED_POSITIONS, [OWN_EPS, Key("attn_config"), of_gguf(_MOST, kind=float)]),
            *([CLIP_QKV], _SIZES, [Key("max_position_embeddings", 2048, gguf="context_length", own="max_seq_len")]),
            [only("expansion_ratio", 4), only("logit_scale", None), only("no_bias", True)],
            [only("norm_type", "low_precision_layernorm", "layernorm"), only("learned_pos_emb", True, False)],
            tie_word_embeddings=True,
        ),
        names=module_names(
            _LAYER,
            {
                "attn_norm": "norm_1",
                "mlp_norm": "norm_2",
                "qkv": "attn.Wqkv",
                "o": "attn.out_proj",
                "up": "ffn.up_proj",
                "down": "ffn.down_proj",
            },
            {"embed": "transformer.wte", "final_norm": "transformer.norm_f"},
        ),
        constants=_WITHOUT_BIASES,
        fused=fused_rows,
        gguf="mpt",
    ),
    "dbrx": Family(
        "DBRX",
        dbrx,
        table(
            *(LAYER_NORMED, [Key("attn_config"), Key("ffn_config"), CLIP_QKV]),
            (of_gguf(key, kind=int) for key in (_COUNT, _CHOSEN)),
            [of_gguf(_EPS, 1e-5, gguf_default=1e-5)],
            [Key("intermediate_size", gguf="feed_forward_length", kind=int)],
            *(_SIZES, [Key("max_position_embeddings", 2048, gguf="context_length", own="max_seq_len", is_alias=True)]),
        ),
        names={
            **module_names(
                _LAYER,
                {
                    "attn_norm": "norm_attn_norm.norm_1",
                    "mlp_norm": "norm_attn_norm.norm_2",
                    "qkv": "norm_attn_norm.attn.Wqkv",
                    "o": "norm_attn_norm.attn.out_proj",
                    "router": "ffn.router.layer",
                },
                {"embed": "transformer.wte", "final_norm": "transformer.norm_f"},
            ),
            **{f"experts.{name}": f"{_LAYER}ffn.experts.{{e}}.{part}.weight" for name, part in _EXPERTS.items()},
        },
        constants=_WITHOUT_BIASES,
        experts_in_rows=tuple(f".experts.mlp.{part}" for part in _EXPERTS.values()),
        transposed=(f".{_EXPERTS['down']}",),
        fused=fused_rows,
        gguf="dbrx",
        gguf_names={"mlp_norm": "blk.{i}.attn_output_norm.weight"},
    ),
}
