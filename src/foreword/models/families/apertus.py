"""Apertus: norms of each head, and an MLP without a gate, whose activation has numbers of its own in each layer."""

from __future__ import annotations

from typing import Any

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
from foreword.models.families.llama import with_rope
from foreword.models.keys import Key, table
from foreword.models.spec import XIELU, DecoderSpec, LayerSpec

_XIELU = "xielu"
_ROPE = {
    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def apertus(config: Config) -> DecoderSpec:
    """Return a spec whose activation is xIELU, unless the config has another one."""
    rotary = rope(config if config.prefix else with_rope(config, _ROPE))
    act = config.get("hidden_act", str)
    own: dict[str, Any] = {"qk_norm": True, "gated_mlp": False, "xielu": act == _XIELU}
    layers = (LayerSpec(rotary),) * num_layers(config)
    return decoder(config, "apertus", layers, None if act == _XIELU else "hidden_act", **own)


FAMILIES = {
    "apertus": Family(
        "Apertus",
        apertus,
        table(
            *(DECODER, ATTENTION_BIAS),
            [Key("hidden_act", _XIELU, (*HIDDEN_ACT.values, _XIELU))],
            rms_norm_eps=1e-5,
            rope_theta=1.2e7,
        ),
        names={
            "attn_norm": SAFETENSORS_LAYER + "attention_layernorm.weight",
            "mlp_norm": SAFETENSORS_LAYER + "feedforward_layernorm.weight",
            **{name: f"{SAFETENSORS_LAYER}mlp.act_fn.{name}" for name in XIELU},
        },
        gguf="apertus",
        gguf_names={name: f"{GGUF_LAYER}{_XIELU}.{name}" for name in XIELU},
        gguf_numbers=tuple(f"{_XIELU}.{name}" for name in XIELU),
    )
}
