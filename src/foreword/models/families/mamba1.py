"""Layers of the first Mamba: what families share."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.config import Config
from foreword.models.families.base import Rows
from foreword.models.families.mamba import MAMBA, time_step_rank
from foreword.models.families.states import STATE_NAMES_IN_GGUF, recurrent_of, stacked, state_names
from foreword.models.keys import Key
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec


def mamba1(config: Config, inner_eps: float | None) -> RecurrentSpec:
    """Return the state of the keys `MAMBA1`. inner_eps: see `RecurrentSpec`."""
    inner = config.size("mamba_inner", config.size("mamba_expand") * config.size("hidden_size"))
    has_bias = config.get("mamba_proj_bias", bool)
    return RecurrentSpec(
        "mamba1",
        num_heads=1,
        num_key_heads=1,
        key_dim=config.size("mamba_d_state", most=1 << 16),
        value_dim=inner,
        conv_kernel=config.size("mamba_d_conv", most=1 << 8),
        conv_bias=config.get("mamba_conv_bias", bool),
        in_bias=has_bias,
        o_bias=has_bias,
        rank=time_step_rank(config, "mamba_dt_rank"),
        inner_eps=inner_eps,
    )


def fused_mamba1(spec: DecoderSpec) -> Mapping[str, Rows]:
    """Return the rows of in_proj, which stacks v and z, and of x_proj, which stacks the products of v."""
    if (recurrent := recurrent_of(spec)) is None:
        return {}
    return {
        **stacked("in_proj", [*recurrent.parts, ("z", recurrent.num_values)]),
        **stacked("x_proj", list(recurrent.inner_parts)),
    }


def mamba1_names(module: str, model: str = "model") -> dict[str, str]:
    """Return the names of the weights of a state in safetensors, as `state_names`."""
    layer = f"{model}.layers.{{i}}.{module}."
    norms = {f"state.{name}_norm": f"{layer}{part}_layernorm.weight" for name, part in _NORMED.items()}
    return {
        **state_names(module, model),
        **norms,
        "x_proj": layer + "x_proj.weight",
        "state.dt": layer + "dt_proj.weight",
        "state.dt_bias": layer + "dt_proj.bias",
    }


_NORMED = {"dt": "dt", "k": "b", "q": "c"}
"""Product of v → its name in files."""
_OF_MAMBA1 = ("mamba_expand", "mamba_inner", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")
MAMBA1 = (
    *(key for key in MAMBA if key.name in _OF_MAMBA1),
    Key("mamba_d_state", 16, gguf="ssm.state_size"),
    Key("mamba_dt_rank", "auto", gguf="ssm.time_step_rank", kind=object),
)
"""Keys of the layers."""
MAMBA1_NAMES_IN_GGUF = {
    **STATE_NAMES_IN_GGUF,
    "x_proj": "blk.{i}.ssm_x.weight",
    "state.dt": "blk.{i}.ssm_dt.weight",
    **{f"state.{name}_norm": f"blk.{{i}}.ssm_{part}_norm.weight" for name, part in _NORMED.items()},
}
