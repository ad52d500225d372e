"""Mamba 2 layers beside attention layers: what families share, and Bamba."""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, WITH_BIASES, Family, Rows, decoder, module_names, num_layers, rope
from foreword.models.families.states import mixed_layers, recurrent_of, stacked, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import Normed, RecurrentSpec, Scales
from foreword.models.rope import PARTIAL_ROTARY
from foreword.models.spec import DecoderSpec


def mamba2(
    config: Config, width: str | None = None, normed: Normed = "last", scales: Scales | None = None
) -> RecurrentSpec:
    """Return the state of the keys `MAMBA`. Raise ModelError if its heads do not have the width of the layer.

    width: the family's own key of that width. normed, scales: see `RecurrentSpec`.
    """
    heads, inner = config.size("mamba_n_heads"), config.size("mamba_expand") * config.size("hidden_size")
    inner = config.size(width or "mamba_inner", inner)  # mamba_inner: of a GGUF file
    head = None if config.prefix else config.value("mamba_d_head")
    recurrent = RecurrentSpec(
        "mamba2",
        num_heads=heads,
        num_key_heads=config.size("mamba_n_groups"),
        key_dim=config.size("mamba_d_state"),
        value_dim=max(1, inner // heads) if head in (None, "auto") else config.size("mamba_d_head"),
        conv_kernel=config.size("mamba_d_conv", most=1 << 8),
        conv_bias=config.get("mamba_conv_bias", bool),
        normed=normed,
        scales=scales,
        in_bias=config.get("mamba_proj_bias", bool),
        o_bias=config.get("mamba_proj_bias", bool),
    )
    if recurrent.num_values != inner:
        expected = f"{width or config.label('mamba_expand') + ' * hidden_size'} = {inner}"
        reason = f"{heads} heads of {config.label('mamba_d_head')} = {recurrent.value_dim} are not {expected}"
        raise config.error(reason, USE_ITS_CONFIG)
    return recurrent


def time_step_rank(config: Config, key: str) -> int:
    """Return the number of inputs of the product of time steps: "auto" is a sixteenth of the hidden size."""
    return -(-config.size("hidden_size") // 16) if config.value(key) == "auto" else config.size(key)


def bamba(config: Config) -> DecoderSpec:
    """Return a spec whose ``attn_layer_indices`` have attention that rotates half of each head; others are Mamba 2."""
    listed = config.indices("attn_layer_indices", count := num_layers(config))
    attends = [i in listed for i in range(count)]
    if (part := config.get(PARTIAL_ROTARY.name, float)) != _PART:  # the reference reads that of rope_parameters alone
        raise config.refused(PARTIAL_ROTARY.name, part)
    return decoder(
        config, "bamba", mixed_layers(config, attends, None if all(attends) else mamba2(config), rope(config))
    )


def fused_mamba(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of in_proj, which stacks z, v, k, q and dt."""
    if (recurrent := recurrent_of(spec)) is None:
        return {}
    return stacked("in_proj", [("z", recurrent.num_values), *recurrent.parts, ("dt", recurrent.num_heads)])


MAMBA = (
    Key("mamba_n_heads", 128, gguf="ssm.time_step_rank"),
    *(Key("mamba_expand", 2), Key("mamba_inner", gguf="ssm.inner_size", kind=int)),
    Key("mamba_d_head", "auto", kind=object),
    Key("mamba_n_groups", 1, gguf="ssm.group_count"),
    Key("mamba_d_state", 256, gguf="ssm.state_size"),
    Key("mamba_d_conv", 4, gguf="ssm.conv_kernel"),
    Key("mamba_conv_bias", True),
    Key("mamba_proj_bias", False),
    only("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
)
"""Keys of Mamba 2 layers."""

# The activation is that of the recurrent layers, too.
_PART = 0.5
_BAMBA = (Key("attn_layer_indices"), PARTIAL_ROTARY, only("hidden_act", "silu", "swish"))
FAMILIES = {
    "bamba": Family(
        "Bamba: Mamba 2 and attention layers",
        bamba,
        table(
            *((*DECODER, *WITH_BIASES), MAMBA, _BAMBA),
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            partial_rotary_factor=_PART,
            mamba_d_head=64,
        ),
        names={
            **state_names("mamba"),
            "mlp_norm": "model.layers.{i}.pre_ff_layernorm.weight",
            "final_norm": "model.final_layernorm.weight",
            **module_names("model.layers.{i}.feed_forward.", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
        },
        fused=fused_mamba,
    )
}
