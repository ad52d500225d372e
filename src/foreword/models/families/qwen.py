"""Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k), dense and with experts."""

from __future__ import annotations

from foreword.models.config import Config
from foreword.models.families.base import Family, decoder, experts, rope, windows
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec


def _layers(config: Config, moe: MoeSpec | None = None) -> tuple[LayerSpec, ...]:
    """Layers from ``max_window_layers`` on slide if ``use_sliding_window``; sparse layers use ``moe``."""
    rotary, first = rope(config), config.get("max_window_layers", int, 0)
    slides = config.get("use_sliding_window", bool, False)
    spans = windows(config, lambda i: slides and i >= first)
    step, dense = config.size("decoder_sparse_step", 1), config.sequence("mlp_only_layers")
    return tuple(
        LayerSpec(rotary, window, moe if i not in dense and (i + 1) % step == 0 else None)
        for i, window in enumerate(spans)
    )


def qwen2(config: Config) -> DecoderSpec:
    return decoder(config, "qwen2", _layers(config), qkv_bias=True)


def qwen2_moe(config: Config) -> DecoderSpec:
    moe = experts(config, norm_topk=False, shared=True)
    return decoder(config, "qwen2_moe", _layers(config, moe), qkv_bias=config.get("qkv_bias", bool, True))


def qwen3(config: Config) -> DecoderSpec:
    return decoder(config, "qwen3", _layers(config), qk_norm=True)


def qwen3_moe(config: Config) -> DecoderSpec:
    return decoder(config, "qwen3_moe", _layers(config, experts(config, norm_topk=True)), qk_norm=True)


FAMILIES = {
    "qwen2": Family(qwen2, gguf="qwen2"),
    "qwen2_moe": Family(qwen2_moe, gguf="qwen2moe"),
    "qwen3": Family(qwen3, gguf="qwen3"),
    "qwen3_moe": Family(qwen3_moe, gguf="qwen3moe"),
}
