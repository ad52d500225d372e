"""BitNet b1.58: a Llama with squared ReLU, and with norms of the inputs of the last products of attention and MLP."""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    GGUF_LAYER,
    HIDDEN_ACT,
    SAFETENSORS_LAYER,
    Family,
    decoder,
    num_layers,
    rope,
)
from foreword.models.keys import Key, table
from foreword.models.spec import DecoderSpec, LayerSpec


def bitnet(config: Config) -> DecoderSpec:
    return decoder(config, "bitnet", (LayerSpec(rope(config)),) * num_layers(config), inner_norms=True)


FAMILIES = {
    "bitnet": Family(
        "BitNet b1.58",
        bitnet,
        table(
            *(DECODER, ATTENTION_BIAS),
            [Key("hidden_act", "relu2", HIDDEN_ACT.values, gguf="hidden_activation", gguf_default="silu")],
            num_key_value_heads=5,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
        ),
        names={
            "inner_attn_norm": SAFETENSORS_LAYER + "self_attn.attn_sub_norm.weight",
            "inner_mlp_norm": SAFETENSORS_LAYER + "mlp.ffn_sub_norm.weight",
        },
        gguf="bitnet",
        gguf_names={
            "inner_attn_norm": GGUF_LAYER + "attn_sub_norm.weight",
            "inner_mlp_norm": GGUF_LAYER + "ffn_sub_norm.weight",
        },
    )
}
