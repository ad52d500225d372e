"""MiniMax M2: norms of the queries and of the keys of all heads together, and a sigmoid router with a bias."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import Config
from foreword.models.families.base import (
    DECODER,
    HIDDEN_ACT,
    NORMED_EXPERTS,
    Family,
    decoder,
    experts,
    head_dim,
    num_layers,
    rope,
)
from foreword.models.keys import Key, only_in_gguf, table
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec, LayerSpec


def minimax_m2(config: Config) -> DecoderSpec:
    """Return a spec. ``rotary_dim`` is the rotary part of a head where the config has no partial_rotary_factor."""
    rotated = config.optional("rotary_dim", int)
    if rotated is not None and config.values.get(PARTIAL_ROTARY.name) is None:
        config = config.with_values({PARTIAL_ROTARY.name: rotated / head_dim(config)})
    moe = replace(experts(config), scoring="sigmoid", router_bias=True)
    layers = (LayerSpec(rope(config), moe=moe),) * num_layers(config)
    return decoder(config, "minimax_m2", layers, qk_norm=True, joint_qk_norm=True)


_MOE = "model.layers.{i}.block_sparse_moe."
FAMILIES = {
    "minimax_m2": Family(
        "MiniMax M2",
        minimax_m2,
        table(
            (*DECODER, HIDDEN_ACT, PARTIAL_ROTARY, *NORMED_EXPERTS),
            [Key("rotary_dim", kind=int), only_in_gguf("expert_gating_func", 2, 0)],
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=5e6,
            num_experts_per_tok=8,
        ),
        names={
            "router": _MOE + "gate.weight",
            "router_bias": _MOE + "e_score_correction_bias",
            "experts.gate": _MOE + "experts.{e}.w1.weight",
            "experts.down": _MOE + "experts.{e}.w2.weight",
            "experts.up": _MOE + "experts.{e}.w3.weight",
        },
        gguf="minimax-m2",
    )
}
