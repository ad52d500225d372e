"""ERNIE 4.5 with experts: Llama with experts, and one that every token uses, in most layers."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, NO_EXPERT_BIASES, Family, decoder, num_layers, rope
from foreword.models.families.deepseek import ROUTED_NAMES
from foreword.models.keys import Key, of_gguf, only, table
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec

_SHARED = "*.expert_shared_feed_forward_length"


def ernie4_5_moe(config: Config) -> DecoderSpec:
    rotary, count, moe = rope(config), num_layers(config), _experts(config)
    first, last = config.get("moe_layer_start_index", int), config.get("moe_layer_end_index", int)
    every = config.size("moe_layer_interval")
    last = count - 1 if last == -1 else last
    has_experts = [first <= i <= last and (i + 1) % every == 0 for i in range(count)]
    layers = tuple(LayerSpec(rotary, moe=moe if has else None) for has in has_experts)
    return decoder(config, "ernie4_5_moe", layers, logits_bias=config.get("use_bias", bool))


def _experts(config: Config) -> MoeSpec:
    """Return the spec of the experts. The bias of the router only affects which experts are chosen."""
    inner, shared = config.size("moe_intermediate_size"), config.get("moe_num_shared_experts", int)
    of_file = config.optional(_SHARED, int)
    moe = MoeSpec(config.size("moe_num_experts"), config.size("moe_k"), inner, shared_gate=False, router_bias=True)
    if moe.experts_per_token > moe.num_experts:
        raise config.error(f"moe_k = {moe.experts_per_token} of {moe.num_experts} experts", USE_ITS_CONFIG)
    if not 0 <= shared <= 64:
        raise config.error(f"moe_num_shared_experts = {shared} is not from 0 to 64", USE_ITS_CONFIG)
    return replace(moe, shared_intermediate_size=config.size(_SHARED) if shared and of_file else inner * shared)


_MLP = "model.layers.{i}.mlp."
_KEYS = (
    *(*DECODER, HIDDEN_ACT, Key("use_bias", False)),
    Key("moe_num_experts", 64, gguf="expert_count", gguf_default=64),
    Key("moe_k", 6, gguf="expert_used_count", gguf_default=6),
    Key("moe_num_shared_experts", 2, gguf="expert_shared_count", gguf_default=0),
    Key("moe_intermediate_size", 1536, gguf="expert_feed_forward_length", gguf_default=1536),
    Key("moe_layer_start_index", 1, gguf="leading_dense_block_count", gguf_default=0),
    Key("moe_layer_end_index", -1),
    Key("moe_layer_interval", 1, gguf="interleave_moe_layer_step", gguf_default=1),
    only("moe_norm_min", 1e-12),  # which the sum of the chosen probabilities is never below
    of_gguf(_SHARED, kind=int),
)
FAMILIES = {
    "ernie4_5_moe": Family(
        "ERNIE 4.5 with experts",
        ernie4_5_moe,
        table(_KEYS, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=5e5),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        names={
            **ROUTED_NAMES,
            "router_bias": _MLP + "moe_statics.e_score_correction_bias",
            "logits_bias": "lm_head.bias",
        },
        constants=NO_EXPERT_BIASES,
        unused=("model.mtp_", "score."),
        interleaved=True,
        gguf="ernie4_5-moe",
        gguf_interleaved=True,
    )
}
