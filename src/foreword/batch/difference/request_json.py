"""Convert what a request has besides tokens and blocks to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from foreword.batch.difference.encoding import malformed, plain
from foreword.batch.values.pooling import PoolingParams
from foreword.batch.values.requests import LoraRequest, MultiModalFeature
from foreword.batch.values.sampling_params import SamplingParams
from foreword.batch.values.structured_outputs import StructuredOutputs
from foreword.errors import ForewordError, RequestError

_TYPES = {"sampling_params": SamplingParams, "lora_request": LoraRequest, "pooling_params": PoolingParams}


def to_json(given: Mapping[str, Any], req_id: str) -> dict[str, Any]:
    """Return the fields of `NewRequest`, without arrays. Raise RequestError for a value that JSON cannot hold."""
    return {
        name: [_differing(feature, req_id) for feature in value] if name == "mm_features" else _differing(value, req_id)
        for name, value in given.items()
        if not isinstance(value, np.ndarray)
    }


def from_json(given: Any) -> dict[str, Any]:
    """Invert the conversion. Raise PlanError for what is not an object with such fields, ConfigError for an adapter
    without number.
    """
    try:
        return {
            name: tuple(MultiModalFeature(**_values(feature)) for feature in value)
            if name == "mm_features"
            else _TYPES[name](**_values(value))
            for name, value in given.items()
        }
    except ForewordError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise malformed("extras", expected="fields of NewRequest", got=str(error)) from None


def _differing(value: Any, req_id: str) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found: dict[str, Any] = {}
    for f in fields(value):
        v = getattr(value, f.name)
        if type(v) is not type(f.default) or v != f.default:
            found[f.name] = v = v.mapping() if isinstance(v, StructuredOutputs) else v
            try:
                json.dumps(v, default=plain)
            except (TypeError, ValueError):
                reason = "cannot be written as JSON, so it cannot be part of a step difference"
                raise RequestError(req_id, f.name, v, reason, "Use numbers, strings, lists and dictionaries.") from None
    return found


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in types that JSON does not have."""
    values = dict(given)
    for name, value in given.items():
        match name:
            case "logit_bias":
                values[name] = {int(token): bias for token, bias in value.items()}
            case "is_embed":
                values[name] = np.array(value, np.bool_)
            case "identifier" | "modality" | "name" | "path" | "task" if isinstance(value, list | dict):
                raise TypeError(f"{name}: expected a string")
    return values
