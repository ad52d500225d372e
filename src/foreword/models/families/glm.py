"""GLM 4: queries and keys in which a part of each head rotates, with biases; gate and up fused; norms around, too."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.config import Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, MLP_BIAS, Family, Rows, decoder, num_layers, rope
from foreword.models.keys import Key, table
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec


def glm(config: Config) -> DecoderSpec:
    return decoder(config, "glm", _layers(config), qkv_bias=config.get("attention_bias", bool))


def glm4(config: Config) -> DecoderSpec:
    """As GLM, with a norm after attention and after the MLP, too."""
    return decoder(config, "glm4", _layers(config), qkv_bias=config.get("attention_bias", bool), post_norms=True)


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    return (LayerSpec(rope(config)),) * num_layers(config)


def _fused(spec: DecoderSpec) -> Mapping[str, Rows]:
    inner = spec.intermediate_size
    return {"gate": Rows("gate_up", 0, inner), "up": Rows("gate_up", inner, 2 * inner)}


_LAYER = "model.layers.{i}."
_KEYS = table(
    (*DECODER, HIDDEN_ACT, PARTIAL_ROTARY, MLP_BIAS, Key("attention_bias", True)),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-07,
    partial_rotary_factor=0.5,
)
FAMILIES = {
    "glm": Family("GLM 4 (first)", glm, _KEYS, interleaved=True, fused=_fused),
    "glm4": Family(
        "GLM 4 (0414)",
        glm4,
        _KEYS,
        names={
            "post_attn_norm": _LAYER + "post_self_attn_layernorm.weight",
            "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight",
        },
        interleaved=True,
        fused=_fused,
        gguf="glm4",
        gguf_interleaved=True,
    ),
}
