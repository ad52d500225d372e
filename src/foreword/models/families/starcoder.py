"""StarCoder 2: LayerNorm, an MLP without a gate, and a bias in every product but the last."""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import (
    HIDDEN_ACT,
    LAYER_NORMED,
    WINDOWS,
    Family,
    decoder,
    num_layers,
    rope,
    same_window,
)
from foreword.models.keys import Key, table
from foreword.models.spec import DecoderSpec, LayerSpec


def starcoder2(config: Config) -> DecoderSpec:
    layers = (LayerSpec(rope(config), same_window(config)),) * num_layers(config)
    return decoder(config, "starcoder2", layers, eps="norm_epsilon", layer_norm=True, gated_mlp=False)


_MLP = "model.layers.{i}.mlp."
FAMILIES = {
    "starcoder2": Family(
        "StarCoder 2",
        starcoder2,
        table(
            LAYER_NORMED,
            [HIDDEN_ACT, *WINDOWS, Key("use_bias", True)],
            [Key("norm_epsilon", 1e-5, gguf="attention.layer_norm_epsilon")],
            num_key_value_heads=2,
            tie_word_embeddings=True,
            hidden_act="gelu_pytorch_tanh",
        ),
        names={
            "up": _MLP + "c_fc.weight",
            "up_bias": _MLP + "c_fc.bias",
            "down": _MLP + "c_proj.weight",
            "down_bias": _MLP + "c_proj.bias",
        },
        gguf="starcoder2",
    )
}
