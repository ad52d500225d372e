"""Falcon-H1: Mamba 2 and attention beside each other in every layer, and multipliers everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    DECODER,
    WITH_BIASES,
    Family,
    decoder,
    head_dim,
    in_parts,
    module_names,
    num_layers,
    rope,
)
from foreword.models.families.mamba import MAMBA, fused_mamba, mamba2
from foreword.models.families.states import STATE_NAMES_IN_GGUF, check_state, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import Normed, RecurrentSpec
from foreword.models.spec import DecoderSpec, LayerSpec


def falcon_h1(config: Config) -> DecoderSpec:
    """Return a spec with two layers for each layer of a file: Mamba 2 alone, and attention beside it with the MLP. A
    multiplier of a product's input or output becomes one of the numbers that are computed from it.
    """
    into, gates = config.positive("attention_in_multiplier"), _multipliers(config, "mlp_multipliers", 2)
    keys = config.positive("key_multiplier")
    if into != 1 and config.get("attention_bias", bool):  # they would be divided by it
        raise config.error(
            f"attention_bias = True with attention_in_multiplier = {into} is not supported", USE_ITS_CONFIG
        )
    mamba = LayerSpec(None, recurrent=_mamba2(config), has_mlp=False, mixer_scale=config.positive("ssm_out_multiplier"))
    attention = LayerSpec(
        rope(config), beside=True, mixer_scale=into * config.positive("attention_out_multiplier"), mlp_scale=gates[1]
    )
    return decoder(
        config,
        "falcon_h1",
        (mamba, attention) * num_layers(config),
        query_scale=head_dim(config) ** -0.5 * into * into * keys,
        gate_scale=gates[0],
        embedding_scale=config.positive("embedding_multiplier"),
        logit_scale=config.positive("lm_head_multiplier"),
    )


def _mamba2(config: Config) -> RecurrentSpec:
    z, v, k, q, dt = (config.positive("ssm_in_multiplier") * x for x in _multipliers(config, "ssm_multipliers", 5))
    normed: Normed = "never"
    if config.get("mamba_rms_norm", bool):
        normed = "first" if config.get("mamba_norm_before_gate", bool) and not config.prefix else "last"
    scales = None if z == v == k == q == dt == 1 else (v, k, q, z, dt)
    recurrent = replace(mamba2(config, "mamba_d_ssm", normed, scales), o_bias=config.get("projectors_bias", bool))
    if (into := config.positive("ssm_in_multiplier")) != 1 and recurrent.in_bias:
        raise config.error(f"mamba_proj_bias = True is not supported with a factor of {into}", USE_ITS_CONFIG)
    check_state(config, recurrent)
    return recurrent


def _multipliers(config: Config, key: str, count: int) -> Sequence[float]:
    found = [1.0] * count if config.value(key) is None else config.sequence(key)
    if len(found) != count or not all(type(x) in (int, float) and 0 < x < math.inf for x in found):
        raise config.error(f"{key} {found!r:.80} is not {count} numbers above 0", USE_ITS_CONFIG)
    return [float(x) for x in found]


def _scaled_by_mlx(config: Config) -> Config:
    """Return the config of weights that MLX has multiplied by most of its numbers: not the values of attention, which
    lack ``attention_in_multiplier``, nor the keys, which lack ``key_multiplier``. A tied embedding is multiplied by
    the number of embeddings, and logits by the quotient of both. Raise ModelError for a number that is missing, in
    whose place MLX has one of its own, and for biases, which MLX does not multiply.
    """
    if missing := next((key for key in (*_FACTORS, *_LISTS) if config.values.get(key) is None), None):
        raise config.error(
            f"{missing} is missing, and MLX has multiplied the weights by one of its own", USE_ITS_CONFIG
        )
    if biased := next((key for key in _BIASES if config.get(key, bool)), None):
        fix = "Use the checkpoint that it converted"
        raise config.error(f"{biased} = True is not supported in a checkpoint by MLX, which multiplies no biases", fix)
    factors = {key: config.positive(key) for key in _FACTORS}
    tied = config.get("tie_word_embeddings", bool)
    logits = factors["lm_head_multiplier"] / factors["embedding_multiplier"] if tied else 1.0
    return config.with_values(
        {
            **dict.fromkeys(_FACTORS, 1.0),
            **dict.fromkeys(_LISTS),
            "key_multiplier": factors["key_multiplier"],
            "attention_out_multiplier": factors["attention_in_multiplier"],
            "lm_head_multiplier": logits,
        }
    )


_FACTORS = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier"),
)
_LISTS = ("mlp_multipliers", "ssm_multipliers")
_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
_KEYS = (
    *(*DECODER, *WITH_BIASES, only("hidden_act", "silu", "swish"), Key("projectors_bias", False)),
    *(key for key in MAMBA if key.name != "mamba_inner"),
    Key("mamba_d_ssm", 1024, gguf="ssm.inner_size", kind=int),
    *(Key("mamba_rms_norm", False), Key("mamba_norm_before_gate", True)),
    *(Key(name, 1.0) for name in _FACTORS),
    *(Key(name) for name in _LISTS),
)
FAMILIES = {
    "falcon_h1": Family(
        "Falcon-H1: Mamba 2 beside attention",
        falcon_h1,
        table(_KEYS, num_key_value_heads=8, rms_norm_eps=1e-5),
        names={
            **state_names("mamba"),
            "mlp_norm": "model.layers.{i}.pre_ff_layernorm.weight",
            "final_norm": "model.final_layernorm.weight",
            **module_names("model.layers.{i}.feed_forward.", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
        },
        fused=fused_mamba,
        gguf="falcon-h1",
        gguf_names=STATE_NAMES_IN_GGUF,
        numbers=in_parts(2),
        is_scaled_in_gguf=True,
        scaled_by_mlx=_scaled_by_mlx,
    )
}
