"""Phi-3: q, k and v fused in one matrix, gate and up in another; optionally longrope."""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import (
    BIASES,
    DECODER,
    HIDDEN_ACT,
    WINDOWS,
    Family,
    decoder,
    fused_rows,
    num_layers,
    rope,
    same_window,
)
from foreword.models.keys import table
from foreword.models.rope import PARTIAL_ROTARY, rope_parameters
from foreword.models.spec import DecoderSpec, LayerSpec


def phi3(config: Config) -> DecoderSpec:
    """Return a spec. In a config.json, the only scaling of the rotary embedding is longrope."""
    kind = rope_parameters(config).get("rope_type", "default")
    if not config.prefix and kind not in ("default", "longrope"):
        raise config.error(f"rope_type {kind!r:.80} is not supported", "Use a model with default or longrope")
    return decoder(config, "phi3", (LayerSpec(rope(config), same_window(config)),) * num_layers(config))


_KEYS = table(DECODER, [HIDDEN_ACT, PARTIAL_ROTARY], BIASES, WINDOWS, rms_norm_eps=1e-5)
FAMILIES = {"phi3": Family("Phi-3", phi3, _KEYS, gguf="phi3", fused=fused_rows)}
