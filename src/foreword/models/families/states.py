"""Shared by families of recurrent and attention layers: the layers of a spec, and the names of weights of states."""

from __future__ import annotations

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import Rows, num_layers
from foreword.models.recurrent import RecurrentSpec, in_bias_of
from foreword.models.spec import DecoderSpec, LayerSpec, RopeSpec


def mixed_layers(
    config: Config, attends: list[bool], recurrent: RecurrentSpec | None, rotary: RopeSpec | None
) -> tuple[LayerSpec, ...]:
    """Return layers with attention where ``attends``, the others with a state. recurrent: None if all have attention.
    Raise ModelError if sizes do not fit.
    """
    if len(attends) != (count := num_layers(config)):
        raise config.error(f"the kinds of {len(attends)} layers are given, the model has {count}", USE_ITS_CONFIG)
    if recurrent is not None:
        check_state(config, recurrent)
    attention = LayerSpec(rotary)
    return tuple(attention if attend else LayerSpec(None, recurrent=recurrent) for attend in attends)


def check_state(config: Config, recurrent: RecurrentSpec) -> None:
    """Raise ModelError for heads that do not fit, and for a state larger than any model's."""
    if recurrent.num_heads % recurrent.num_key_heads:
        reason = f"{recurrent.num_heads} recurrent heads are not a multiple of {recurrent.num_key_heads} key heads"
        raise config.error(reason, USE_ITS_CONFIG)
    if recurrent.state_size > 1 << 28:
        raise config.error(f"a recurrent layer has a state of {recurrent.state_size} numbers", USE_ITS_CONFIG)


def recurrent_of(spec: DecoderSpec) -> RecurrentSpec | None:
    """Return the state of the recurrent layers; None if all layers have attention."""
    return next((layer.recurrent for layer in spec.layers if layer.recurrent), None)


def stacked(source: str, sizes: list[tuple[str, int]], *, repeats: bool = False) -> dict[str, Rows]:
    """Return weights of a recurrent layer with these numbers of rows, in this order in ``source``, and their biases."""
    ends = [sum(size for _, size in sizes[: i + 1]) for i in range(len(sizes))]
    period = ends[-1] if repeats else None
    return {
        f"state.{own}": Rows(tensor, end - size, end, period)
        for (name, size), end in zip(sizes, ends, strict=True)
        for own, tensor in ((name, source), (in_bias_of(name), source + "_bias"))
    }


def state_names(module: str, model: str = "model") -> dict[str, str]:
    """Return the names of the weights of a state in safetensors, where layers of ``model`` have it in ``module``."""
    layer = f"{model}.layers.{{i}}.{module}."
    projections = ("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return {
        "state.conv": layer + "conv1d.weight",
        "state.conv_bias": layer + "conv1d.bias",
        "state.dt_bias": layer + "dt_bias",
        "state.a_log": layer + "A_log",
        "state.skip": layer + "D",
        "state.norm": layer + "norm.weight",
        "state.o": layer + "out_proj.weight",
        "state.o_bias": layer + "out_proj.bias",
        "in_proj_bias": layer + "in_proj.bias",
        **{name: f"{layer}{name}.weight" for name in projections},
    }


ANY_LENGTH = 1 << 20
"""The largest number of tokens of a request, which models of states do not have; converters to GGUF write this one."""
STATE_NAMES_IN_GGUF = {
    "in_proj": "blk.{i}.ssm_in.weight",
    "state.conv": "blk.{i}.ssm_conv1d.weight",
    "state.conv_bias": "blk.{i}.ssm_conv1d.bias",
    "state.dt_bias": "blk.{i}.ssm_dt.bias",
    "state.a_log": "blk.{i}.ssm_a",
    "state.skip": "blk.{i}.ssm_d",
    "state.norm": "blk.{i}.ssm_norm.weight",
    "state.o": "blk.{i}.ssm_out.weight",
}
