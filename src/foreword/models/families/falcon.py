"""Falcon: LayerNorm, a rotary embedding, and an MLP without a gate, which as a rule reads the input of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    HIDDEN_ACT,
    LAYER_NORMED,
    Family,
    by_head,
    fused_rows,
    module_names,
    num_layers,
    rope,
)
from foreword.models.families.gpt import OWN_EPS, gpt_decoder
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, LayerSpec


def falcon(config: Config) -> DecoderSpec:
    """Return a spec. In the architecture of Falcon 40B and later, attention and MLP read the same input, each with its
    norm if there are two.
    """
    is_new, heads = config.get("new_decoder_architecture", bool), config.size("num_attention_heads")
    kv_heads = heads if config.value("num_key_value_heads") is None else config.size("num_key_value_heads")
    if not is_new and config.get("multi_query", bool) and not config.prefix:
        kv_heads = 1
    has_bias, layers = config.get("bias", bool), (LayerSpec(rope(config)),) * num_layers(config)
    own: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), has_bias)
    own |= {"parallel_mlp": config.get("parallel_attn", bool), "parallel_norm": _num_norms(config, is_new) == 2}
    return gpt_decoder(config, "falcon", layers, num_kv_heads=kv_heads, **own)


def _num_norms(config: Config, is_new: bool) -> int:
    """Return the number of norms before attention and MLP, where both read the same input."""
    given = config.value(_NORMS)
    count = config.size(_NORMS) if given is not None else 2 if is_new else 1
    if count != 1 and not (is_new and count == 2):
        raise config.refused(_NORMS, count)
    if is_new and not config.get("parallel_attn", bool):
        raise config.error(
            "parallel_attn = False with new_decoder_architecture = True is not supported", USE_ITS_CONFIG
        )
    return count


def _fused(spec: DecoderSpec) -> Mapping[str, Any]:
    """Return the rows of one tensor that has the queries of a key/value head, its keys and its values, and so on.
    Return the names of norms, too.
    """
    size = spec.head_dim
    rows = by_head(("q", spec.num_heads // spec.num_kv_heads * size), ("k", size), ("v", size))
    return {**rows, **(_TWO_NORMS if spec.parallel_norm else {})}


def _fused_in_gguf(spec: DecoderSpec) -> Mapping[str, Any]:
    return {**fused_rows(spec), **(_TWO_NORMS_IN_GGUF if spec.parallel_norm else {})}


_NORMS, _LAYER = "num_ln_in_parallel_attn", "transformer.h.{i}."
_TWO_NORMS = module_names(_LAYER, {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"})
_TWO_NORMS_IN_GGUF = module_names("blk.{i}.", {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"})
FAMILIES = {
    "falcon": Family(
        "Falcon",
        falcon,
        table(
            *(LAYER_NORMED, [only("alibi", False), Key("bias", False), Key("parallel_attn", True)]),
            [Key("multi_query", True), Key("new_decoder_architecture", False), Key(_NORMS, kind=int)],
            [Key("num_key_value_heads", gguf="attention.head_count_kv", own="num_kv_heads")],
            [Key("intermediate_size", gguf="feed_forward_length", own="ffn_hidden_size")],
            [OWN_EPS, Key("hidden_act", "gelu", HIDDEN_ACT.values, own="activation")],
            tie_word_embeddings=True,
            max_position_embeddings=2048,
        ),
        aliases={"n_embed": "hidden_size"},
        names=module_names(
            _LAYER,
            {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "o": "self_attention.dense",
             "qkv": "self_attention.query_key_value", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
            {"embed": "transformer.word_embeddings", "final_norm": "transformer.ln_f"},
        ),
        fused=_fused,
        gguf="falcon",
        gguf_fused=_fused_in_gguf,
    )
}  # fmt: skip
