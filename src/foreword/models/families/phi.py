"""Phi-1 to 2: attention and MLP read the same input. Phi-3: fused matrices, and optionally longrope, or experts.
Persimmon: LayerNorm of queries and keys.
"""

from __future__ import annotations

from typing import Any

from foreword.models.config import Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    LAYER_NORM_EPS,
    LAYER_NORMED,
    SPARSE_MOE_NAMES,
    WINDOWS,
    Family,
    check_groups,
    decoder,
    fused_rows,
    module_names,
    num_layers,
    rope,
    same_window,
)
from foreword.models.families.gpt import rows_by_head
from foreword.models.keys import Key, only, table
from foreword.models.rope import PARTIAL_ROTARY, check_type
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec, QKLayerNorm, RopeSpec


def phi(config: Config) -> DecoderSpec:
    """Return the spec of Phi-1, 1.5 and 2, all of whose products have biases, also that of the head."""
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    own: dict[str, Any] = dict.fromkeys(
        ("layer_norm", "parallel_mlp", "qkv_bias", "o_bias", "mlp_bias", "logits_bias"), True
    )
    return decoder(config, "phi2", layers, eps="layer_norm_eps", gated_mlp=False, **own, **_qk_norms(config))


def persimmon(config: Config) -> DecoderSpec:
    layers = (LayerSpec(rope(config)),) * num_layers(config)
    own: dict[str, Any] = dict.fromkeys(("layer_norm", "qkv_bias", "o_bias", "mlp_bias"), True)
    return decoder(config, "persimmon", layers, eps="layer_norm_eps", gated_mlp=False, **own, **_qk_norms(config))


def _qk_norms(config: Config) -> dict[str, Any]:
    """Return the norms of queries and keys, if the model has them: LayerNorm, with one weight for all heads."""
    has_norms = config.get("qk_layernorm", bool)
    return {"qk_norm": True, "qk_layer_norm": QKLayerNorm(has_bias=True)} if has_norms else {}


def phi3(config: Config) -> DecoderSpec:
    return decoder(config, "phi3", (LayerSpec(_rope(config), same_window(config)),) * num_layers(config))


def phimoe(config: Config) -> DecoderSpec:
    """Return the spec of Phi-3.5 with experts: LayerNorm, and two experts per token that are taken in rounds.

    Requests above the original length have the long factors, as in the model's own code. transformers 5.23 keeps the
    short ones.
    """
    moe = MoeSpec(
        config.size("num_local_experts"),
        config.size("num_experts_per_tok"),
        config.size("intermediate_size"),
        norm_topk=False,
        sparse_mix=2 * config.get("router_jitter_noise", float),
    )
    check_groups(config, moe)
    if moe.sparse_mix is None or moe.sparse_mix < 0:
        raise config.refused("router_jitter_noise", config.value("router_jitter_noise"))
    layers = (LayerSpec(_rope(config), same_window(config), moe),) * num_layers(config)
    has_bias = config.get("lm_head_bias", bool)
    return decoder(config, "phimoe", layers, layer_norm=True, logits_bias=has_bias)


def _rope(config: Config) -> RopeSpec:
    """Return the rotary embedding of all layers. In a config.json, its only scaling is longrope."""
    if not config.prefix:
        check_type(config, "default", "longrope")
    return rope(config)


_QK_NORMS = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}
_KEYS = table(DECODER, [HIDDEN_ACT, PARTIAL_ROTARY], WINDOWS, rms_norm_eps=1e-5)
FAMILIES = {
    "phi": Family(
        "Phi-1, 1.5 and 2",
        phi,
        table(
            *(LAYER_NORMED, [HIDDEN_ACT, PARTIAL_ROTARY, Key("qk_layernorm", False)]),
            [LAYER_NORM_EPS],
            hidden_act="gelu_new",
            partial_rotary_factor=0.5,
        ),
        names=module_names(
            "model.layers.{i}.",
            {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", **_QK_NORMS},
            {"final_norm": "model.final_layernorm"},
        )
        | {"logits_bias": "lm_head.bias"},
        gguf="phi2",
        gguf_names={"logits_bias": "output.bias"},
    ),
    "persimmon": Family(
        "Persimmon",
        persimmon,
        table(
            *(LAYER_NORMED, [HIDDEN_ACT, PARTIAL_ROTARY, Key("qk_layernorm", True)]),
            [LAYER_NORM_EPS, only("num_key_value_heads", None)],
            hidden_act="relu2",
            partial_rotary_factor=0.5,
        ),
        names=module_names(
            "model.layers.{i}.",
            {
                "qkv": "self_attn.query_key_value",
                "o": "self_attn.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
                **_QK_NORMS,
            },
            {"final_norm": "model.final_layernorm"},
        ),
        fused=rows_by_head,
    ),
    "phi3": Family("Phi-3", phi3, _KEYS, gguf="phi3", fused=fused_rows),
    "phimoe": Family(
        "Phi-3.5 with experts",
        phimoe,
        table(
            *(DECODER, [HIDDEN_ACT], ATTENTION_BIAS, WINDOWS, [Key("lm_head_bias", False)]),
            [Key("num_local_experts", 16, gguf="expert_count"), Key("router_jitter_noise", 0.01)],
            [Key("num_experts_per_tok", 2, (2,), gguf="expert_used_count")],
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        names={"logits_bias": "lm_head.bias", **SPARSE_MOE_NAMES},
        renamed={".mlp.router.": ".block_sparse_moe.gate."},
        gguf="phimoe",
        gguf_names={"logits_bias": "output.bias"},
    ),
}
