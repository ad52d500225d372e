"""The difference itself, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreword.arrays import I32, AnyArray
from foreword.batch.difference.encoding import (
    Header,
    extras_from_json,
    extras_to_json,
    mrope,
    number,
    pack,
    params_from_json,
    params_to_json,
    unpack,
)
from foreword.batch.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepDifference:
    """What changes in `RequestStates` before a step, and the step. Rows are equal on both sides.

    step: its number. base: checksum of the states that the difference belongs to; None: a snapshot, for new states.
    geometry: of a snapshot, what both states must have in common. base_seed, num_admissions: as in the states.
    pad_to: (tokens, requests), −1 for none. gather: whether the block tables are gathered.
    req_ids: the requests admitted, in order. extras: index in req_ids → fields of `NewRequest` that few requests have.
    params: state row → sampling parameters. staged: state row → M-RoPE positions given after the admission.
    arrays: all other values by name, listed in docs/difference.md. An absent array is empty. Where every entry of a
    column is equal, one entry represents all of them.
    """

    step: int
    base: int | None
    base_seed: int
    num_admissions: int
    gather: bool
    pad_to: tuple[int, int] = (-1, -1)
    geometry: Mapping[str, Any] | None = None
    req_ids: tuple[str, ...] = ()
    extras: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    params: Mapping[int, SamplingParams] = field(default_factory=dict)
    staged: Mapping[int, I32] = field(default_factory=dict)
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)

    @property
    def is_snapshot(self) -> bool:
        """Whether it carries all live requests, for new states."""
        return self.base is None

    def to_bytes(self) -> bytes:
        """The difference in the format of docs/difference.md. RequestError for parameters that JSON cannot hold."""
        header: dict[str, Any] = {"step": self.step, "seed": self.base_seed, "admissions": self.num_admissions}
        arrays = dict(self.arrays)
        if self.base is not None:
            header["base"] = self.base
        if self.geometry is not None:
            header["geometry"] = self.geometry
        if self.pad_to != (-1, -1):
            header["pad_to"] = self.pad_to
        if not self.gather:
            header["gather"] = False
        if self.req_ids:
            header["req_ids"] = self.req_ids
        if self.extras:
            header["extras"] = {i: extras_to_json(i, values, arrays) for i, values in self.extras.items()}
        if self.params:
            header["params"] = {row: params_to_json(params, f"row {row}") for row, params in self.params.items()}
        arrays |= {f"staged.{row}": positions for row, positions in self.staged.items()}
        return pack(header, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepDifference:
        """The inverse of `to_bytes`; its arrays are views of ``data``. PlanError, naming the part, for malformed bytes;
        RequestError for sampling parameters out of range.
        """
        header, arrays = unpack(data)
        given = Header(header)
        staged = {name: arrays.pop(name) for name in list(arrays) if name.startswith("staged.")}
        difference = cls(
            step=given.integer("step"),
            base=given.integer("base") if "base" in header else None,
            base_seed=given.integer("seed"),
            num_admissions=given.integer("admissions"),
            gather=given.of("gather", bool, True),
            pad_to=given.pair("pad_to"),
            geometry=given.of("geometry", dict, None),
            req_ids=given.strings("req_ids"),
            extras={i: extras_from_json(i, values, arrays) for i, values in given.bynumber("extras").items()},
            params={row: params_from_json(value) for row, value in given.bynumber("params").items()},
            staged={number("staged", name[7:]): mrope(name, array) for name, array in staged.items()},
            arrays=arrays,
        )
        given.finish()
        return difference
