"""Ministral 3: Mistral with the rotary embedding of yarn, whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, WINDOWS, Family, decoder, num_layers, rope, same_window
from foreword.models.keys import of_gguf, table
from foreword.models.rope import rope_parameters
from foreword.models.spec import DecoderSpec, LayerSpec, QueryGrowth

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # for a configuration without rotary parameters  # fmt: skip
_GROWTH, _LENGTH, _LOG = "llama_4_scaling_beta", "original_max_position_embeddings", "yarn_log_multiplier"
_GGUF_GROWTH, _GGUF_LENGTH = "*.attention.temperature_scale", "*.attention.temperature_length"


def ministral3(config: Config) -> DecoderSpec:
    """Return a spec whose factor of queries changes at multiples of the length before the context was extended."""
    config, growth = _growing(config)
    layer = LayerSpec(rope(config), same_window(config), query_growth=growth)
    return decoder(config, "ministral3", (layer,) * num_layers(config))


def _growing(config: Config) -> tuple[Config, QueryGrowth | None]:
    """Return the config without the keys of the growth among its rotary parameters, and the growth. A GGUF file has the
    growth beside them, and the scale of all dimensions under another name.
    """
    given = config.value("rope_parameters") is not None or config.value("rope_scaling") is not None
    parameters: dict[str, Any] = rope_parameters(config) if given else dict(_YARN)
    scale, length = parameters.pop(_GROWTH, None), _first(config.value(_LENGTH), parameters.get(_LENGTH))
    parameters.pop("max_position_embeddings", None)
    if config.prefix:
        scale, length = config.value(_GGUF_GROWTH), _first(config.value(_GGUF_LENGTH), length)
        if log := Config(config.path, parameters).get(_LOG, float, 0.0):
            parameters |= {"mscale": 1.0, "mscale_all_dim": log}
        parameters.pop(_LOG, None)
    values: Mapping[str, Any] = {**config.values, "rope_parameters": parameters, "rope_scaling": None}
    own = replace(config, values=values)
    rules = Config(config.path, {_GROWTH: scale, _LENGTH: length})
    if rules.get(_GROWTH, float, 0.0) == 0:
        return own, None
    if length is None:
        raise config.error(f"{_GROWTH} without {_LENGTH}", USE_ITS_CONFIG)
    return own, QueryGrowth(rules.size(_LENGTH), rules.positive(_GROWTH), offset=0)


def _first(value: object, other: object) -> object:
    """Return a value, or the other one if it is absent."""
    return other if value is None else value


FAMILIES = {
    "ministral3": Family(
        "Ministral 3",
        ministral3,
        table(
            *(DECODER, WINDOWS, [HIDDEN_ACT]),
            [of_gguf(_GGUF_GROWTH, kind=float), of_gguf(_GGUF_LENGTH, kind=int)],
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        unused=("score.", "vision_tower.", "multi_modal_projector."),
        gguf="mistral3",
        gguf_interleaved=True,
    )
}
