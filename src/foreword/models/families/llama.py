"""Llama 2 and 3, Mistral, Mixtral and SmolLM3: the base decoder, with windows, experts or layers without rotation."""

from __future__ import annotations

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import Family, decoder, experts, num_layers, rope, windows
from foreword.models.spec import DecoderSpec, LayerSpec


def llama(config: Config) -> DecoderSpec:
    moe = (
        experts(config, norm_topk=True) if config.values.get("num_experts") else None
    )  # GGUF files name Mixtral "llama"
    layer = LayerSpec(rope(config), moe=moe)
    return decoder(config, "llama", (layer,) * num_layers(config))


def mistral(config: Config) -> DecoderSpec:
    rotary = rope(config)
    return decoder(config, "mistral", tuple(LayerSpec(rotary, w) for w in windows(config, lambda i: True)))


def mixtral(config: Config) -> DecoderSpec:
    rotary, moe = rope(config), experts(config, norm_topk=True)
    return decoder(config, "mixtral", tuple(LayerSpec(rotary, w, moe) for w in windows(config, lambda i: True)))


def smollm3(config: Config) -> DecoderSpec:
    """Every fourth layer has no rotary embedding, unless ``no_rope_layers`` lists the layers (1: rotary)."""
    rotary, count = rope(config), num_layers(config)
    every = config.size("no_rope_layer_interval", 4)
    flags = config.sequence("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if len(flags) != count:
        raise config.error(f"no_rope_layers has {len(flags)} entries for {count} layers", USE_ITS_CONFIG)
    spans = windows(config, lambda i: config.get("use_sliding_window", bool, False))
    layers = tuple(LayerSpec(rotary if flag else None, w) for flag, w in zip(flags, spans, strict=True))
    return decoder(config, "smollm3", layers, tie_embeddings=config.get("tie_word_embeddings", bool, True))


_MIXTRAL = "model.layers.{i}.block_sparse_moe."
FAMILIES = {
    "llama": Family(llama, gguf="llama", gguf_interleaved=True),
    "mistral": Family(mistral),
    "mixtral": Family(
        mixtral,
        names={
            "router": _MIXTRAL + "gate.weight",
            "experts.gate": _MIXTRAL + "experts.{e}.w1.weight",
            "experts.down": _MIXTRAL + "experts.{e}.w2.weight",
            "experts.up": _MIXTRAL + "experts.{e}.w3.weight",
        },
    ),
    "smollm3": Family(smollm3, gguf="smollm3", gguf_interleaved=True),
}
