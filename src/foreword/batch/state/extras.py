"""Values that few requests have, by row: embeddings, features, rotary positions, pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.arrays import I32, AnyArray, Bools
from foreword.batch.values.integers import is_int32
from foreword.batch.values.multimodal import MultiModalFeature
from foreword.batch.values.pooling import PoolingParams, PoolingState
from foreword.batch.values.requests import NewRequest
from foreword.errors import RequestError


class RowExtras:
    """Sparse values by row, and one dense array that is made when the first request needs it.

    prompt_embeds    row → [prompt_len, hidden]
    mm_features      row → features, in prompt order
    mrope_positions  row → int32 [dims, n], the rotary positions of the first n tokens
    pooling_params   row → `PoolingParams`;  pooling_states  row → `PoolingState`, empty at admission
    is_token_id      bool [R, M], False where the position is a prompt embedding; None until a request brings one

    `sparse` and `arrays` list them all, so that moving, swapping and clearing rows are loops over the list.
    """

    __slots__ = (
        "_rows",
        "is_token_id",
        "mm_features",
        "mrope_positions",
        "pooling_params",
        "pooling_states",
        "prompt_embeds",
    )

    def __init__(self) -> None:
        self.prompt_embeds: dict[int, AnyArray] = {}
        self.mm_features: dict[int, tuple[MultiModalFeature, ...]] = {}
        self.mrope_positions: dict[int, I32] = {}
        self.pooling_params: dict[int, PoolingParams] = {}
        self.pooling_states: dict[int, PoolingState] = {}
        self.is_token_id: Bools | None = None
        self._rows: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def sparse(self) -> tuple[dict[int, Any], ...]:
        """Every map from row to value."""
        return self.prompt_embeds, self.mm_features, self.mrope_positions, self.pooling_params, self.pooling_states

    def arrays(self) -> list[AnyArray]:
        """Every array whose first axis is the row."""
        return [] if self.is_token_id is None else [self.is_token_id]

    def set(self, row: int, request: NewRequest, shape: tuple[int, int]) -> None:
        """Store the values of a new request. ``shape`` is (R, M)."""
        self._rows.add(row)
        if request.prompt_embeds is not None:
            if self.is_token_id is None:
                self.is_token_id = np.ones(shape, np.bool_)
            self.prompt_embeds[row] = np.asarray(request.prompt_embeds)
            mask = request.prompt_is_token_id
            self.is_token_id[row, : len(request.prompt_embeds)] = False if mask is None else mask
        if request.mm_features:
            self.mm_features[row] = tuple(request.mm_features)
        if request.mrope_positions is not None:
            self.mrope_positions[row] = np.ascontiguousarray(request.mrope_positions, np.int32)
        if request.pooling_params is not None:
            self.pooling_params[row] = request.pooling_params
            self.pooling_states[row] = PoolingState()

    def stage_mrope(self, row: int, positions: I32) -> None:
        """Keep the rotary positions of an admitted request."""
        self._rows.add(row)
        self.mrope_positions[row] = positions

    def clear(self, row: int) -> bool:
        """Remove everything of a row. Whether there was anything."""
        if row not in self._rows:
            return False
        self._rows.remove(row)
        for values in self.sparse():
            values.pop(row, None)
        if self.is_token_id is not None:
            self.is_token_id[row] = True
        return True

    def clear_all(self) -> None:
        """Remove everything."""
        self._rows.clear()
        for values in self.sparse():
            values.clear()
        if self.is_token_id is not None:
            self.is_token_id[:] = True

    def exchange(self, a: int, b: int) -> None:
        """Exchange two rows in the sparse maps (`arrays` move with the states' own)."""
        for values in self.sparse():
            moved = {to: values.pop(row) for row, to in ((a, b), (b, a)) if row in values}
            values.update(moved)
        self._rows = {{a: b, b: a}.get(row, row) for row in self._rows}


def has_extras(request: NewRequest) -> bool:
    """Whether a request brings anything for `RowExtras`."""
    return bool(
        request.prompt_embeds is not None
        or request.mm_features
        or request.mrope_positions is not None
        or request.mrope_delta
        or request.encoder_len
        or request.pooling_params is not None
    )


def check_extras(request: NewRequest, prompt_len: int) -> None:
    """RequestError for the first value that does not fit the prompt or has the wrong type."""

    def require(ok: object, field: str, value: object, reason: str, fix: str) -> None:
        if not ok:
            raise RequestError(request.req_id, field, value, reason, fix)

    embeds, mask, m = request.prompt_embeds, request.prompt_is_token_id, request.mrope_positions
    if embeds is not None:
        shape, limit = shape_of(embeds), f"must be [{prompt_len}, hidden]"
        require(
            len(shape) == 2 and shape[0] == prompt_len, "prompt_embeds", shape, limit, "Give one vector per position."
        )
    if mask is not None:
        shape, limit = shape_of(mask), f"must be [{prompt_len}], together with prompt_embeds"
        fits = embeds is not None and shape == (prompt_len,)
        require(fits, "prompt_is_token_id", shape, limit, "Give one truth value per position, or leave it out.")
        missing, limit = request.prompt_token_ids is None and np.any(mask), "names a token without prompt_token_ids"
        require(not missing, "prompt_is_token_id", True, limit, "Give the token ids.")
    for feature in request.mm_features:
        known = isinstance(feature, MultiModalFeature)
        require(known, "mm_features", feature, "expected a MultiModalFeature", "Pass one per image.")
        feature.check(request.req_id, prompt_len)
    ok = m is None or len(shape_of(m)) == 2
    require(ok, "mrope_positions", m, "must be [dims, tokens]", "Give one row per dimension.")
    delta, length, pooling = request.mrope_delta, request.encoder_len, request.pooling_params
    require(is_int32(delta), "mrope_delta", delta, "must fit int32", "Give a whole number.")
    require(is_int32(length, 0), "encoder_len", length, "must be a number of tokens", "Give 0 for no encoder.")
    ok = pooling is None or isinstance(pooling, PoolingParams)
    require(ok, "pooling_params", pooling, "expected PoolingParams or None", "Pass one of them.")


def shape_of(values: Any) -> tuple[int, ...]:
    """The shape of an array or of nested lists; () where it has none."""
    try:
        return np.shape(values)
    except ValueError:  # lists of lists of different lengths
        return ()
