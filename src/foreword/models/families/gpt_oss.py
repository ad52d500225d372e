"""gpt-oss: alternating windows, attention sinks, biases everywhere, and experts with a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import Config
from foreword.models.families.base import (
    DECODER,
    NORMED_EXPERTS,
    WINDOWS,
    Family,
    Rows,
    decoder,
    experts,
    rope,
    windows,
)
from foreword.models.keys import Key, only, table
from foreword.models.spec import ClampedGate, DecoderSpec, LayerSpec

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def gpt_oss(config: Config) -> DecoderSpec:
    """Return a spec in which every other layer has a sliding window, beginning with the first.

    The probabilities of the chosen experts are a softmax of their scores alone, which equals those of all experts
    divided by their sum.
    """
    config = _with_rope(config)
    rotary, moe = rope(config), replace(experts(config), scores_bias=True)
    return decoder(
        config,
        "gpt_oss",
        tuple(LayerSpec(rotary, w, moe, has_sinks=True) for w in windows(config, lambda i: i % 2 == 0)),
        act=None,
        mlp_bias=True,
        clamped_gate=ClampedGate(config.positive("swiglu_alpha"), config.positive("swiglu_limit")),
    )


def _with_rope(config: Config) -> Config:
    """Return the config with the rotary parameters that it lacks. A GGUF file does not say that ramps are exact."""
    scaling = config.value("rope_scaling")
    if config.prefix and isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        return config.with_values({"rope_scaling": {**scaling, "truncate": False}})
    if config.prefix or scaling is not None or config.value("rope_parameters") is not None:
        return config
    return config.with_values({"rope_parameters": _YARN})


_MLP = "model.layers.{i}.mlp."
FAMILIES = {
    "gpt_oss": Family(
        "gpt-oss",
        gpt_oss,
        table(
            *(DECODER, WINDOWS, NORMED_EXPERTS),
            [Key("attention_bias", True), Key("swiglu_alpha", 1.702), Key("swiglu_limit", 7.0)],
            [only("hidden_act", "silu")],
            num_key_value_heads=8,
            head_dim=64,
            sliding_window=128,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            num_experts_per_tok=4,
            num_local_experts=128,
        ),
        names={
            "sinks": "model.layers.{i}.self_attn.sinks",
            "router": _MLP + "router.weight",
            "scores_bias": _MLP + "router.bias",
            "experts.gate_up": _MLP + "experts.gate_up_proj",
            "experts.gate_up_bias": _MLP + "experts.gate_up_proj_bias",
            "experts.down": _MLP + "experts.down_proj",
            "experts.down_bias": _MLP + "experts.down_proj_bias",
        },
        fused=lambda spec: {
            f"experts.{name}{end}": Rows(f"experts.gate_up{end}", first, first + 1, 2)
            for first, name in enumerate(("gate", "up"))
            for end in ("", "_bias")
        },
        gguf="gpt-oss",
        gguf_names={"mlp_norm": "blk.{i}.post_attention_norm.weight"},
        gguf_fused=lambda spec: {},
        transposed_experts=True,
        peft_swaps_experts="never",
    )
}
