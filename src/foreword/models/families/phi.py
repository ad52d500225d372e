"""Phi-1 to 2: attention and MLP read the same input. Phi-3: fused matrices, and optionally longrope."""

from __future__ import annotations

from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    DECODER,
    HIDDEN_ACT,
    LAYER_NORM_EPS,
    LAYER_NORMED,
    WINDOWS,
    Family,
    decoder,
    fused_rows,
    module_names,
    num_layers,
    rope,
    same_window,
)
from foreword.models.keys import only, table
from foreword.models.rope import PARTIAL_ROTARY, rope_parameters
from foreword.models.spec import DecoderSpec, LayerSpec


def phi(config: Config) -> DecoderSpec:
    """Return the spec of Phi-1, 1.5 and 2, all of whose products have biases, also that of the head."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    own: dict[str, Any] = dict.fromkeys(
        ("layer_norm", "parallel_mlp", "qkv_bias", "o_bias", "mlp_bias", "logits_bias"), True
    )
    return decoder(config, "phi2", layers, eps="layer_norm_eps", gated_mlp=False, **own)


def phi3(config: Config) -> DecoderSpec:
    """Return a spec. In a config.json, the only scaling of the rotary embedding is longrope."""
    kind = rope_parameters(config).get("rope_type", "default")
    if not config.prefix and kind not in ("default", "longrope"):
        raise config.error(f"rope_type {kind!r:.80} is not supported", "Use a model with default or longrope")
    return decoder(config, "phi3", (LayerSpec(rope(config), same_window(config)),) * num_layers(config))


_KEYS = table(DECODER, [HIDDEN_ACT, PARTIAL_ROTARY], WINDOWS, rms_norm_eps=1e-5)
FAMILIES = {
    "phi": Family(
        "Phi-1, 1.5 and 2",
        phi,
        table(
            *(LAYER_NORMED, [HIDDEN_ACT, PARTIAL_ROTARY, only("qk_layernorm", False)]),
            [LAYER_NORM_EPS],
            hidden_act="gelu_new",
            partial_rotary_factor=0.5,
        ),
        names=module_names(
            "model.layers.{i}.",
            {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
            {"final_norm": "model.final_layernorm"},
        )
        | {"logits_bias": "lm_head.bias"},
        gguf="phi2",
        gguf_names={"logits_bias": "output.bias"},
    ),
    "phi3": Family("Phi-3", phi3, _KEYS, gguf="phi3", fused=fused_rows),
}
