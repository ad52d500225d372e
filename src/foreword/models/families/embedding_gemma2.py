"""EmbeddingGemma 2 (text): a Gemma 4 whose tokens see later ones, with vectors in place of logits."""

from __future__ import annotations

import math

from foreword.models.config import Config
from foreword.models.families.base import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    DECODER,
    WINDOWS,
    Family,
    decoder,
    head_dim,
    windows,
)
from foreword.models.families.encoder_base import no_head
from foreword.models.families.gemma import NORM_NAMES
from foreword.models.families.gemma4 import full_heads, ropes
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, HeadShape, LayerSpec, PerLayerSpec


def embedding_gemma2(config: Config) -> DecoderSpec:
    """Return a spec whose windows reach to both sides, and whose inputs of each layer have no table of tokens."""
    every, dim, hidden = config.size("sliding_window_pattern"), head_dim(config), config.size("hidden_size")
    spans = windows(config, lambda i: (i + 1) % every != 0, is_optional=False)
    spans = (*spans[:-1], None)  # the last layer is full, whatever is listed
    slides = [window is not None for window in spans]
    local = HeadShape(config.size("num_key_value_heads"), dim, config.size("num_attention_heads"), dim)
    full = full_heads(config, slides, local, config.size("num_global_key_value_heads"))
    local_rope, full_rope = ropes(config, slides, local.head_dim, full.head_dim, _ROPES)
    layers = tuple(
        LayerSpec(
            full_rope if window is None else local_rope,
            None if window is None else window + 1,
            heads=None if window is not None or full == local else full,
            unit_v=True,
        )
        for window in spans
    )
    return decoder(
        config,
        "embedding_gemma2",
        layers,
        act="hidden_activation",
        query_scale=1.0,
        qk_norm=True,
        embedding_scale=math.sqrt(hidden),
        post_norms=True,
        # norm(x / sqrt(hidden)) with eps is norm(x) with hidden · eps; the table is one row of zeros
        per_layer=PerLayerSpec(
            config.size("hidden_size_per_layer_input", most=1 << 16),
            vocab_size=1,
            norm_eps=config.positive("rms_norm_eps") * hidden,
            embedding_scale=1.0,
            scale=1.0,
        ),
        layer_scales=True,
        is_causal=False,
    )


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_LAYER = "model.layers.{i}."
_SIZES = {
    "vocab_size": 262144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 4, "max_position_embeddings": 262144,
}  # that configurations of images and texts leave out  # fmt: skip
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512}
FAMILIES = {
    "embedding_gemma2_text": Family(
        "EmbeddingGemma 2 (text)",
        embedding_gemma2,
        table(
            [*DECODER, *ATTENTION_BIAS, *WINDOWS, only("is_causal", False)],
            [
                Key("hidden_activation", "gelu_pytorch_tanh", tuple(ACTIVATIONS)),
                *(Key("global_head_dim", 512), Key("num_global_key_value_heads", 1)),
                Key("per_layer_config", kind=object),
                *(Key("sliding_window_pattern", 6), Key("hidden_size_per_layer_input", 512), Key("embedding_dim", 768)),
            ],
            **_DEFAULTS,
            **_SIZES,
        ),
        names={
            **NORM_NAMES,
            "layer_scale": _LAYER + "layer_scalar",
            "per_layer_in": "model.ple.per_layer_model_projection.weight",
            "per_layer_norm": "model.ple.per_layer_projection_norm.weight",
            "per_layer_gate": _LAYER + "ple_block.per_layer_input_gate.weight",
            "per_layer_out": _LAYER + "ple_block.per_layer_projection.weight",
            "post_per_layer_norm": _LAYER + "ple_block.post_per_layer_input_norm.weight",
        },
        constants={"per_layer_embed": 0.0},
        unused=("model.embed_vision.", "model.embed_audio.", "model.audio_tower."),
        pooling="mean",
        projection=("model.embedding_projection", "embedding_dim"),
        head=no_head,
    )
}
