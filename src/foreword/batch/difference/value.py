"""The difference itself, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.difference.encoding import malformed, pack, unpack
from foreword.batch.difference.request_json import from_json, to_json
from foreword.integers import is_int32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepDifference:
    """The changes of `RequestStates` before a step, and the step. Rows are equal on both sides.

    step: its number. base: checksum of the states that the difference belongs to; None: a snapshot, for new states.
    geometry: of a snapshot, what both states must have in common. base_seed, num_admissions: as in the states.
    pad_to: (tokens, requests), −1 for none. gather: whether the block tables are gathered.
    req_ids: the requests admitted, in order. extras: of each, the fields of `NewRequest` that no array holds.
    arrays: all other values by name, listed in docs/difference.md. An absent array is empty.
    """

    step: int
    num_admissions: int
    base: int | None = None
    base_seed: int = 0
    gather: bool = True
    pad_to: tuple[int, int] = (-1, -1)
    geometry: Mapping[str, Any] | None = None
    req_ids: tuple[str, ...] = ()
    extras: tuple[Mapping[str, Any], ...] = ()
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)

    @property
    def is_snapshot(self) -> bool:
        """Return whether it carries all live requests, for new states."""
        return self.base is None

    def to_bytes(self) -> bytes:
        """Return the difference in the format of docs/difference.md.

        Raise RequestError for parameters that JSON cannot hold.
        """
        header = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        arrays = dict(header.pop("arrays"))
        if self.extras:
            header["extras"] = list(map(to_json, self.extras, self.req_ids))
        for i, values in enumerate(self.extras):
            arrays |= {f"{name}.{i}": value for name, value in values.items() if isinstance(value, np.ndarray)}
        return pack(header, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepDifference:
        """Return the difference that `to_bytes` wrote, as views of ``data``. Raise PlanError for malformed bytes,
        ConfigError for adapter 0.
        """
        header, arrays = unpack(data)
        for name in {"step", "num_admissions"} - header.keys():
            raise malformed("header", expected=name)
        for name, value in header.items():
            if name not in _VALID or not _VALID[name](value):
                raise malformed(name, expected="a value of this format", got=value)
        extras = [from_json(values) for values in header.pop("extras", ())]
        for i, values in enumerate(extras):
            for name in ("prompt_embeds", "prompt_is_token_id", "encoder_input", "bidirectional_ranges"):
                if f"{name}.{i}" in arrays:
                    values[name] = arrays.pop(f"{name}.{i}").copy()
        given: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in header.items()}
        difference = cls(**given, extras=tuple(extras), arrays=arrays)
        if len(extras) not in (0, len(difference.req_ids)):
            raise malformed("extras", expected=len(difference.req_ids), got=len(extras))
        return difference


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "num_admissions", "base", "base_seed"), _is_int64),
    "gather": lambda value: type(value) is bool,
    "geometry": lambda value: type(value) is dict,
    "pad_to": lambda value: type(value) is list and len(value) == 2 and all(is_int32(n, -1) for n in value),
    "req_ids": lambda value: type(value) is list and all(type(req_id) is str for req_id in value),
    "extras": lambda value: type(value) is list,
}
"""Value of the header → whether it has the right type."""
