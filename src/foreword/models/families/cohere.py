"""Cohere's Command and Aya: MLP and attention read the same input. Command R7B and A: windows, and layers without
rotation.
"""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    WINDOWS,
    Family,
    decoder,
    num_layers,
    rope,
    windows,
)
from foreword.models.keys import Key, only, only_in_gguf, table
from foreword.models.spec import DecoderSpec, LayerSpec


def cohere(config: Config) -> DecoderSpec:
    return _decoder(config, "cohere", (LayerSpec(rope(config)),) * num_layers(config))


def cohere2(config: Config) -> DecoderSpec:
    """Return a spec of three layers with a window for each one without, which does not rotate."""
    rotary, every = rope(config), config.size("sliding_window_pattern")
    spans = windows(config, lambda i: (i + 1) % every != 0, is_optional=False)
    return _decoder(config, "cohere2", tuple(LayerSpec(rotary if span else None, span) for span in spans))


def _decoder(config: Config, architecture: str, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    scale = config.positive("logit_scale")
    return decoder(
        config, architecture, layers, eps="layer_norm_eps", layer_norm=True, parallel_mlp=True, logit_scale=scale
    )


_COMMON = (
    *(key for key in DECODER if key.name != "rms_norm_eps"),
    *(HIDDEN_ACT, *ATTENTION_BIAS, only_in_gguf("attention.layer_norm_rms_epsilon", None)),
    Key("layer_norm_eps", 1e-5, gguf="attention.layer_norm_epsilon", gguf_default=1e-5),
    Key("logit_scale", 0.0625, gguf="logit_scale", gguf_default=0.0625),
)
_NO_BIASES = {"attn_norm_bias": 0.0, "final_norm_bias": 0.0}
_PATTERN = "sliding_window_pattern"
FAMILIES = {
    "cohere": Family(
        "Command R, Aya",
        cohere,
        table(_COMMON, [only("use_qk_norm", False)], tie_word_embeddings=True, rope_theta=500000.0),
        constants=_NO_BIASES,
        interleaved=True,
        gguf="command-r",
        gguf_interleaved=True,
    ),
    "cohere2": Family(
        "Command R7B, Command A",
        cohere2,
        table(
            *(_COMMON, WINDOWS, [Key(_PATTERN, 4, gguf=f"attention.{_PATTERN}", gguf_default=4)]),
            [only_in_gguf("rope.freq_base_swa", None)],
            tie_word_embeddings=True,
            sliding_window=4096,
        ),
        constants=_NO_BIASES,
        interleaved=True,
        gguf="cohere2",
        gguf_interleaved=True,
    ),
}
