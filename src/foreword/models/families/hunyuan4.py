"""Hunyuan 4: latent attention with sinks and gates to the keys that an indexer chooses, and hyper-connections."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import Config
from foreword.models.families.base import Family
from foreword.models.families.deepseek import (
    INDEXED,
    INDEXED_NAMES,
    INDEXER_TYPES,
    LOCAL_ROUTED,
    SCORING,
    latent_rows,
    sparse_flags,
    takes_chosen,
    with_indexers,
)
from foreword.models.keys import Key, only, table
from foreword.models.spec import ConnectionsSpec, DecoderSpec

_MOST_STREAMS = 16  # kMostConnected in native/kernels/bind_model.h


def hy_v4(config: Config) -> DecoderSpec:
    """Return a spec like GLM 5's. A limit of gates that is not positive is refused: its reference says that it means
    none, and computes with it.
    """
    spec, limit = with_indexers(config, "hy_v4", sparse_flags(config, 1)), config.positive("swiglu_limit")
    assert spec.indexer is not None
    layers = (
        replace(layer, has_sinks=True, takes_chosen=takes, moe=layer.moe and replace(layer.moe, gate_limit=limit))
        for layer, takes in zip(spec.layers, takes_chosen(config), strict=True)
    )
    connections = ConnectionsSpec(
        num_streams=config.size("hc_mult", most=_MOST_STREAMS),
        magnitude=config.positive("hc_magnitude"),
        eps=0.0 if config.value("hc_eps") == 0 else config.positive("hc_eps"),
    )
    indexer = replace(spec.indexer, norm_eps=spec.norm_eps)
    return replace(spec, layers=tuple(layers), attn_gate=True, indexer=indexer, connections=connections)


_LAYER = "model.layers.{i}."
_MIX = {"": "fn", "_base": "base", "_scale": "scale"}
FAMILIES = {
    "hy_v4": Family(
        "Hunyuan 4: latent attention to the keys that an indexer chooses, and hyper-connections",
        hy_v4,
        table(
            *(INDEXED, SCORING, [Key(INDEXER_TYPES), only("index_topk_freq", 4), only("index_skip_topk_offset", 2)]),
            [only("index_topk_pattern", None), only("indexer_rope_interleave", False)],
            [only("rope_interleave", False), only("first_k_dense_replace", 1), only("moe_layer_freq", 1)],
            [Key("hc_mult", 4), Key("hc_magnitude", 2.0), Key("hc_eps", 1e-6), Key("swiglu_limit", 10.0)],
            [Key("num_nextn_predict_layers", kind=int)],
            rms_norm_eps=1e-5,
            qk_nope_head_dim=192,
            v_head_dim=256,
            moe_intermediate_size=768,
            n_group=1,
            topk_group=1,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            routed_scaling_factor=2.827,
            index_n_heads=16,
        ),
        aliases=LOCAL_ROUTED,
        names={
            **INDEXED_NAMES,
            "attn_gate": _LAYER + "self_attn.gate_proj.weight",
            "sinks": _LAYER + "self_attn.sinks",
            **{f"attn_mix{end}": f"{_LAYER}attn_hc.{part}" for end, part in _MIX.items()},
            **{f"mlp_mix{end}": f"{_LAYER}ffn_hc.{part}" for end, part in _MIX.items()},
            **{f"out_mix{end}": f"model.hc_head.hc_{part}" for end, part in _MIX.items()},
        },
        renamed={
            ".learnable_sink_param": ".sinks",
            ".linear_gate.": ".gate_proj.",
            ".hc_attn_layer.": ".attn_hc.",
            ".hc_mlp_layer.": ".ffn_hc.",
            ".hc_pre.": ".",
            ".attn_hc.hc_": ".attn_hc.",
            ".ffn_hc.hc_": ".ffn_hc.",
            ".hc_head_": ".hc_",
        },
        unused=("score.", "model.mtp_layers."),
        indexer_rows="last",
        fused=latent_rows,
    )
}
