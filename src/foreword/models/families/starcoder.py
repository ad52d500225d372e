"""StarCoder 2: LayerNorm, an MLP without a gate, and a bias in every product but the last."""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, WINDOWS, Family, decoder, num_layers, rope, same_window
from foreword.models.keys import Key, only, only_in_gguf, table
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
            (key for key in DECODER if key.name != "rms_norm_eps"),
            [HIDDEN_ACT, *WINDOWS, Key("use_bias", True)],
            [only("attention_bias", False), only("mlp_bias", False)],
            [
                Key("norm_epsilon", 1e-5, gguf="attention.layer_norm_epsilon"),
                only_in_gguf("attention.layer_norm_rms_epsilon", None),
            ],
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
