"""MPT and DBRX, whose configurations have parts of their own for attention and experts."""

from __future__ import annotations

from typing import Any

from foreword.models.alibi import alibi_slopes
from foreword.models.config import Config
from foreword.models.families.base import (
    LEARNED_POSITIONS,
    Family,
    fused_rows,
    limit_of,
    module_names,
    num_layers,
    part_of,
)
from foreword.models.families.gpt import OWN_EPS, gpt_decoder
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, LayerSpec


def mpt(config: Config) -> DecoderSpec:
    """Return a spec whose MLP has GELU. In GGUF files, what ``attn_config`` says stands beside the other keys."""
    own: dict[str, Any] = {"max_model_len": config.size("max_position_embeddings")}
    if config.prefix:
        most, own["clip_qkv"] = config.positive(_MOST), limit_of(config, "clip_qkv")
    else:
        attention = part_of(config, "attn_config", _ATTENTION)
        most = 8.0
        own["clip_qkv"] = limit_of(attention, "clip_qkv") if attention.value("clip_qkv") else None
        if attention.value("softmax_scale") is not None:
            own["query_scale"] = attention.positive("softmax_scale")
    layers, slopes = (LayerSpec(None),) * num_layers(config), alibi_slopes(config.size("num_attention_heads"), most)
    return gpt_decoder(config, "mpt", layers, activation="gelu", slopes=slopes, **own)


_MOST = "*.attention.max_alibi_bias"
_ATTENTION = table(
    [only("alibi", True), only("alibi_bias_max", 8), Key("clip_qkv", kind=float), Key("softmax_scale", kind=float)],
    [only("attn_type", "multihead_attention"), only("prefix_lm", False), only("qk_ln", False)],
    [Key("attn_impl", kind=str), Key("attn_uses_sequence_id", kind=bool)],  # without sequence ids
)
_LAYER = "transformer.blocks.{i}."
_WITHOUT_BIASES = {f"{name}_norm_bias": 0.0 for name in ("attn", "mlp", "final")}
FAMILIES = {
    "mpt": Family(
        "MPT",
        mpt,
        table(
            *(LEARNED_POSITIONS, [OWN_EPS, Key("attn_config"), Key(_MOST, gguf=_MOST.removeprefix("*."), kind=float)]),
            [Key("clip_qkv", gguf="attention.clamp_kqv", kind=float)],
            [Key("hidden_size", gguf="embedding_length", own="d_model", is_alias=True)],
            [Key("num_hidden_layers", gguf="block_count", own="n_layers", is_alias=True)],
            [Key("num_attention_heads", gguf="attention.head_count", own="n_heads", is_alias=True)],
            [Key("max_position_embeddings", 2048, gguf="context_length", own="max_seq_len")],
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
    )
}
