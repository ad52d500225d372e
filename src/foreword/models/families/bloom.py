"""BLOOM: LayerNorm, also of embeddings, an MLP without a gate, and biases of attention by distance."""

from __future__ import annotations

from foreword.models.alibi import alibi_slopes
from foreword.models.config import Config
from foreword.models.families.base import LEARNED_POSITIONS, Family, fused_rows, module_names, num_layers
from foreword.models.families.gpt import OWN_EPS, gpt_decoder, rows_by_head
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, LayerSpec

_MOST = 8.0
_LAYER = "transformer.h.{i}."


def bloom(config: Config) -> DecoderSpec:
    layers, heads = (LayerSpec(None),) * num_layers(config), config.size("num_attention_heads")
    length = config.size("max_position_embeddings")
    own = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "embed_norm": True, "max_model_len": length}
    slopes = alibi_slopes(heads, _MOST)
    return gpt_decoder(config, "bloom", layers, activation="gelu_tanh", slopes=slopes, **own)


FAMILIES = {
    "bloom": Family(
        "BLOOM",
        bloom,
        table(
            *(LEARNED_POSITIONS, [OWN_EPS, only("apply_residual_connection_post_layernorm", False)]),
            [Key("num_hidden_layers", gguf="block_count", own="n_layer", is_alias=True)],
            [Key("num_attention_heads", gguf="attention.head_count", own="n_head", is_alias=True)],
            [Key("max_position_embeddings", 2048, gguf="context_length", own="seq_length")],
            tie_word_embeddings=True,
        ),
        aliases={"n_embed": "hidden_size"},
        names=module_names(
            _LAYER,
            {
                "attn_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
                "o": "self_attention.dense",
                "qkv": "self_attention.query_key_value",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            {
                "embed": "transformer.word_embeddings",
                "embed_norm": "transformer.word_embeddings_layernorm",
                "final_norm": "transformer.ln_f",
            },
        ),
        fused=rows_by_head,
        gguf="bloom",
        gguf_names=module_names("", {"embed_norm": "token_embd_norm"}),
        gguf_fused=fused_rows,
    )
}
