"""RecurrentGemma (Griffin): gated linear recurrences (RG-LRU), and layers of attention with a window."""

from __future__ import annotations

import math
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    MAX_WINDOW,
    SAFETENSORS_LAYER,
    Family,
    decoder,
    module_names,
    num_layers,
    rope,
)
from foreword.models.families.states import ANY_LENGTH, mixed_layers
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec, in_bias_of
from foreword.models.rope import PARTIAL_ROTARY, check_type
from foreword.models.spec import DecoderSpec


def recurrent_gemma(config: Config) -> DecoderSpec:
    """Return a spec whose ``block_types`` repeat over the layers. Each part of the MLP has half of
    ``intermediate_size``.
    """
    count, kinds = num_layers(config), config.sequence("block_types")
    if not kinds or not all(kind in _KINDS for kind in kinds):
        raise config.error(f"block_types {kinds!r:.80} are not of {' and '.join(_KINDS)}", USE_ITS_CONFIG)
    check_type(config, "default")
    attends = [kinds[i % len(kinds)] == "attention" for i in range(count)]
    window = config.size("sliding_window", most=MAX_WINDOW)
    layers = mixed_layers(config, attends, None if all(attends) else _recurrence(config), rope(config))
    return decoder(
        config,
        "recurrent_gemma",
        tuple(replace(layer, sliding_window=window) if layer.has_attention else layer for layer in layers),
        act="hidden_activation",
        intermediate_size=max(1, config.size("intermediate_size") // 2),
        embedding_scale=_nearest_bf16(math.sqrt(config.size("hidden_size"))),
        final_softcap=config.positive("logits_soft_cap"),
        o_bias=True,
        mlp_bias=True,
    )


def _recurrence(config: Config) -> RecurrentSpec:
    heads, width = config.size("num_attention_heads"), config.size("lru_width", config.size("hidden_size"))
    if width % heads:
        reason = f"lru_width = {width} is not a multiple of num_attention_heads = {heads}"
        raise config.error(reason, USE_ITS_CONFIG)
    return RecurrentSpec(
        "rg_lru",
        num_heads=1,
        num_key_heads=1,
        key_dim=1,
        value_dim=width,
        conv_kernel=config.size("conv1d_width", most=1 << 8),
        conv_bias=True,
        in_bias=True,
        o_bias=True,
        rank=width // heads,
    )


def _nearest_bf16(x: float) -> float:
    """Return the number of 8 significant bits that is nearest to x: the reference holds the factor as one."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 256), exponent - 8)


_KINDS = ("recurrent", "attention")
_BLOCK, _MLP = SAFETENSORS_LAYER + "temporal_block.", SAFETENSORS_LAYER + "mlp_block."
_UNIT = _BLOCK + "rg_lru."
_OF_GATES = {"write": "input_gate", "forget": "recurrent_gate"}
FAMILIES = {
    "recurrent_gemma": Family(
        "RecurrentGemma: RG-LRU and attention layers",
        recurrent_gemma,
        table(
            *(DECODER, ATTENTION_BIAS),
            [
                PARTIAL_ROTARY,
                Key("max_position_embeddings", ANY_LENGTH),
                Key("sliding_window", 2048, own="attention_window_size", is_alias=True),
                Key("block_types", list(_KINDS[:1] * 2 + _KINDS[1:])),
                Key("lru_width", kind=int),
                Key("conv1d_width", 4),
                Key("logits_soft_cap", 30.0),
                only("hidden_activation", "gelu_pytorch_tanh"),
                only("embeddings_scale_by_sqrt_dim", True),
            ],
            partial_rotary_factor=0.5,
            tie_word_embeddings=True,
        ),
        aliases={"_block_types": "block_types"},
        names={
            "final_norm": "model.final_norm.weight",
            "attn_norm": SAFETENSORS_LAYER + "temporal_pre_norm.weight",
            "mlp_norm": SAFETENSORS_LAYER + "channel_pre_norm.weight",
            **module_names(_BLOCK, {name: f"{name}_proj" for name in "qkvo"}),
            **module_names(_MLP, {name: f"{name}_proj" for name in ("gate", "up", "down")}),
            **module_names(_BLOCK, {"state.conv": "conv_1d", "state.o": "linear_out"}),
            **{
                name: f"{_BLOCK}linear_{module}.{end}"
                for part, module in (("v", "x"), ("z", "y"))
                for name, end in ((f"state.{part}", "weight"), (f"state.{in_bias_of(part)}", "bias"))
            },
            **{f"state.{name}": f"{_UNIT}{part}_weight" for name, part in _OF_GATES.items()},
            **{f"state.{name}_bias": f"{_UNIT}{part}_bias" for name, part in _OF_GATES.items()},
            "state.a": _UNIT + "recurrent_param",
        },
        norms_less_one=True,
        transposed=tuple(f".{part}_weight" for part in _OF_GATES.values()),
    )
}
