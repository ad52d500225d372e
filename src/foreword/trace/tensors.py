"""The tensors of a trace: their names, and how each is read from a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch import InputBatch, discard_mask, lora_mapping, mrope_positions, token_sources
from foreword.batch.proof.spec import TENSORS, Level, TensorSpec
from foreword.batch.step.layout import FIELDS
from foreword.batch.values.sampling_params import PARAMETERS

Value = AnyArray | list[AnyArray] | int | str | None
"""The value of a tensor: an array, one array per KV group, a scalar, or the name of an enum; None if the step does not
have it."""

STEP_TENSORS = tuple(s for s in TENSORS if s.level is not Level.SYSTEM and s.attribute != "function")
# Row numbers, which differ between engines, and tensors that only this library has.
_OWN = {"idx_mapping", "expanded_idx_mapping", "row_generation", "num_placeholders", "num_blocks"}
RECORDED = tuple(spec for spec in STEP_TENSORS if spec.attribute is None and spec.name not in _OWN)
"""The tensors that this library records."""


@dataclass(frozen=True, slots=True)
class TraceTensor:
    """A tensor that a trace may have. The fields are those of `TensorSpec`."""

    name: str
    shape: tuple[str, ...]
    padding: int | float | str | None = None
    per_group: bool = False
    optional: str | None = None
    spec: TensorSpec | None = None

    def read(self, batch: InputBatch) -> Value:
        """Return the tensor of a step."""
        if self.spec is not None:
            return value_of(batch, self.spec)
        if self.name in _FEATURES:
            return _FEATURES[self.name](batch)
        if self.name in _LORA:
            array: AnyArray = getattr(lora_mapping(batch), _LORA[self.name])
            return array
        column: AnyArray = batch.states.sampling.by_name[_SAMPLING[self.name]]
        return column[batch.idx_mapping]


_FEATURES: Mapping[str, Callable[[InputBatch], AnyArray]] = {
    "discard_mask": discard_mask,
    "mrope_positions": mrope_positions,
}
_LORA = {"lora_requests": "requests", "lora_tokens": "tokens", "lora_logits": "logits"}
_SAMPLING = {f"sampling.{row.column.name or row.name}": row.column.name or row.name for row in PARAMETERS if row.column}

NAMED: Mapping[str, TraceTensor] = {
    tensor.name: tensor
    for tensor in (
        *(
            TraceTensor(spec.name, spec.shape, spec.padding, spec.per_group, spec.optional, spec)
            for spec in STEP_TENSORS
            if spec in RECORDED or spec.name in ("block_numbers", "block_offsets")
        ),
        *(TraceTensor(name, FIELDS[name].shape, FIELDS[name].padding) for name in (*_FEATURES, *_LORA)),
        *(TraceTensor(name, ("B",)) for name in _SAMPLING),
    )
}
"""Every tensor that a trace may have, apart from ``req_ids``."""


def value_of(batch: InputBatch, spec: TensorSpec) -> Value:
    """Return a tensor of a step."""
    if spec.optional == "gathered block tables" and not batch.is_gathered:
        return None
    if spec.attribute == "explain":
        return [getattr(token_sources(batch, group), spec.name) for group in range(len(batch.slot_mapping))]
    value: Any = getattr(batch, spec.name)
    if spec.per_group:
        return list(value)
    if isinstance(value, Enum):
        return value.name
    found: Value = value
    return found


def values_of(batch: InputBatch, specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Return ``req_ids``, and those of the tensors that the step has, by name. The arrays are those of the step."""
    values = {spec.name: value_of(batch, spec) for spec in specs}
    return {"req_ids": list(batch.req_ids)} | {name: value for name, value in values.items() if value is not None}


def copied_values(batch: InputBatch) -> dict[str, Any]:
    """Return the tensors of a step that this library records, as copies that later steps do not change."""
    return {name: _copied(value) for name, value in values_of(batch, RECORDED).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_copied(item) for item in value] if isinstance(value, list) else value
