"""Values that few requests have, by row: embeddings, features, rotary positions, pooling."""

from __future__ import annotations

from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import I32, AnyArray, Bools
from foreword.batch.state.changes import Change
from foreword.batch.state.memory import zeros
from foreword.batch.values.pooling import PoolingParams, PoolingState
from foreword.batch.values.requests import MultiModalFeature, NewRequest
from foreword.errors import RequestError
from foreword.integers import as_int32, as_integer, is_int32


class GivenExtras(NamedTuple):
    """The checked values of a request for `RowExtras`. values: attribute of `RowExtras` → its value for the row."""

    rope_delta: int
    encoder_len: int
    is_embedding: Bools | None
    values: dict[str, Any]


class RowExtras:
    """Sparse values by row, and one dense array that is allocated when the first request needs it.

    prompt_embeds    row → [prompt_len, hidden]
    mm_features      row → features, in prompt order
    mrope_positions  row → int32 [dims, n], the rotary positions of the first n tokens
    bidirectional_ranges  row → int32 [n, 2], ranges [start, stop) of positions that see each other, ascending
    encoder_inputs   row → the input of the encoder of an encoder-decoder
    pooling_params   row → `PoolingParams`;  pooling_states  row → `PoolingState`, empty at admission
    is_embedding bool [R, M], True if the position is a prompt embedding; None until a request has one. Only positions
    of prompts with embeddings are written, so only these take memory.

    `sparse` lists all maps, so that moving, swapping and clearing rows are loops over the list.
    """

    __slots__ = (
        "bidirectional_ranges", "encoder_inputs", "is_embedding", "mm_features", "mrope_positions", "pooling_params",
        "pooling_states", "prompt_embeds", "rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_embeds: dict[int, AnyArray] = {}
        self.mm_features: dict[int, tuple[MultiModalFeature, ...]] = {}
        self.mrope_positions: dict[int, I32] = {}
        self.bidirectional_ranges: dict[int, I32] = {}
        self.encoder_inputs: dict[int, AnyArray] = {}
        self.pooling_params: dict[int, PoolingParams] = {}
        self.pooling_states: dict[int, PoolingState] = {}
        self.is_embedding: Bools | None = None
        self.rows: set[int] = set()  # rows with any of these values

    def __len__(self) -> int:
        return len(self.rows)

    def sparse(self) -> tuple[dict[int, Any], ...]:
        """Return every map from row to value."""
        of_prompts = self.prompt_embeds, self.mm_features, self.mrope_positions, self.encoder_inputs
        return *of_prompts, self.bidirectional_ranges, self.pooling_params, self.pooling_states

    def set(self, row: int, given: GivenExtras, shape: tuple[int, int]) -> list[Change]:
        """Return the changes that store the values of a new request. ``shape`` is (R, M)."""
        if not (given.values or given.rope_delta or given.encoder_len):
            return []
        changes: list[Change] = [(self.rows.add, row)]
        if (mask := given.is_embedding) is not None:
            of_row = self.is_embedding
            if of_row is None:
                of_row = zeros(shape, "bool", "max_num_reqs × max_model_len", few_rows=True)
            changes += (setattr, self, "is_embedding", of_row), (setitem, of_row, (row, slice(len(mask))), mask)
        return changes + [(setitem, getattr(self, name), row, value) for name, value in given.values.items()]

    def stage_mrope(self, row: int, positions: I32) -> None:
        """Store the rotary positions of an admitted request."""
        self.rows.add(row)
        self.mrope_positions[row] = positions

    def clear(self, row: int) -> list[Change]:
        """Return the changes that remove all values of a row."""
        if row not in self.rows:
            return []
        changes: list[Change] = [(self.rows.remove, row), *((values.pop, row, None) for values in self.sparse())]
        if self.is_embedding is not None and (embeds := self.prompt_embeds.get(row)) is not None:
            changes.append((setitem, self.is_embedding, (row, slice(len(embeds))), False))
        return changes

    def exchange(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if self.is_embedding is not None:
            longest = max(len(self.prompt_embeds.get(row, ())) for row in (a, b))
            self.is_embedding[[a, b], :longest] = self.is_embedding[[b, a], :longest]
        for values in self.sparse():
            moved = {to: values.pop(row) for row, to in ((a, b), (b, a)) if row in values}
            values.update(moved)
        if (a in self.rows) != (b in self.rows):
            self.rows ^= {a, b}


def checked_extras(request: NewRequest, prompt_len: int) -> GivenExtras:
    """Return the request's values. Raise RequestError for the first one that does not fit the prompt or has the wrong
    type.
    """

    def require(ok: object, field: str, value: object, reason: str, fix: str) -> None:
        if not ok:
            raise RequestError(request.req_id, field, value, reason, fix)

    values: dict[str, Any] = {}
    embeds, mask, positions = request.prompt_embeds, request.prompt_is_token_id, request.mrope_positions
    if embeds is not None:
        shape, limit = shape_of(embeds), f"must be numbers [{prompt_len}, hidden]"
        fits = len(shape) == 2 and shape[0] == prompt_len and np.asarray(embeds).dtype.kind not in "OSU"
        require(fits, "prompt_embeds", shape, limit, "Give one vector per position.")
        values["prompt_embeds"] = np.asarray(embeds)
    if mask is not None:
        shape, limit = shape_of(mask), f"must be bool [{prompt_len}], together with prompt_embeds"
        fits = embeds is not None and shape == (prompt_len,) and np.asarray(mask).dtype.kind in "biu"
        require(fits, "prompt_is_token_id", shape, limit, "Give one truth value per position, or leave it out.")
        missing, limit = request.prompt_token_ids is None and np.any(mask), "names a token without prompt_token_ids"
        require(not missing, "prompt_is_token_id", True, limit, "Give the token ids.")
    listed = isinstance(request.mm_features, list | tuple)
    require(listed, "mm_features", request.mm_features, "expected a list of MultiModalFeature", "Give () for none.")
    for feature in request.mm_features:
        known = isinstance(feature, MultiModalFeature)
        require(known, "mm_features", feature, "expected a MultiModalFeature", "Pass one per image.")
        feature.check(request.req_id, prompt_len)
    if request.mm_features:
        values["mm_features"] = tuple(request.mm_features)
    if positions is not None:
        table = as_int32(positions)
        most = prompt_len + len(request.output_token_ids)
        fits = table is not None and table.ndim == 2 and table.shape[1] <= most
        limit = f"must be integers [dims, tokens] of at most the {most} known tokens"
        require(fits, "mrope_positions", positions, limit, "Give one row per dimension.")
        values["mrope_positions"] = np.ascontiguousarray(table)
    if shape_of(request.bidirectional_ranges)[:1] != (0,):
        ranges = _checked_ranges(request.bidirectional_ranges, prompt_len)
        limit = f"must be ranges [start, stop) of the prompt's {prompt_len} positions, ascending and disjoint"
        fix = "Give (start, stop) per range."
        require(ranges is not None, "bidirectional_ranges", request.bidirectional_ranges, limit, fix)
        values["bidirectional_ranges"] = ranges
    delta, length, pooling = as_integer(request.mrope_delta), as_integer(request.encoder_len), request.pooling_params
    require(is_int32(delta), "mrope_delta", request.mrope_delta, "must fit int32", "Give a whole number.")
    ok, limit = is_int32(length, 0), "must be a number of tokens"
    require(ok, "encoder_len", request.encoder_len, limit, "Give 0 for no encoder.")
    if request.encoder_input is not None:
        got, limit = type(request.encoder_input).__name__, "must be an array of numbers"
        fits = isinstance(request.encoder_input, np.ndarray) and request.encoder_input.dtype.kind in "iuf"
        require(fits, "encoder_input", got, limit, "Give None for no encoder.")
        values["encoder_inputs"] = request.encoder_input
    if pooling is not None:
        ok, limit = isinstance(pooling, PoolingParams), "expected PoolingParams or None"
        require(ok, "pooling_params", pooling, limit, "Pass one of them.")
        values |= {"pooling_params": pooling, "pooling_states": PoolingState()}
    embedded = None if embeds is None else np.logical_not(np.zeros(prompt_len, np.bool_) if mask is None else mask)
    return GivenExtras(delta or 0, length or 0, embedded, values)


def _checked_ranges(given: Any, prompt_len: int) -> I32 | None:
    """Return the ranges as int32 [n, 2]; None unless 0 ≤ start < stop ≤ next start … ≤ prompt_len."""
    ranges = as_int32(given)
    if ranges is None or ranges.ndim != 2 or ranges.shape[1] != 2:
        return None
    borders = ranges.reshape(-1).astype(np.int64)
    ascend = (np.diff(borders) >= 1 - np.arange(len(borders) - 1) % 2).all()
    return ranges.copy() if ascend and borders[0] >= 0 and borders[-1] <= prompt_len else None


def shape_of(values: Any) -> tuple[int, ...]:
    """Return the shape of an array or of nested lists; () if it has none."""
    try:
        return np.shape(values)
    except (TypeError, ValueError):  # lists of different lengths, or values that NumPy cannot read
        return ()
