"""What few requests have, kept by row beside the arrays that all have. A request without any of it costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.arrays import I32, AnyArray, Bools
from foreword.batch.values.integers import is_int32
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.batch.features.multimodal import MultiModalFeature
    from foreword.batch.features.pooling import PoolingParams
    from foreword.batch.values.requests import NewRequest


class RowExtras:
    """Sparse per-row values, and two dense arrays that are made when the first request needs them.

    prompt_embeds    row → [prompt_len, hidden]
    mm_features      row → features, in prompt order
    mrope_positions  row → int32 [dims, n], the rotary positions of the first n tokens
    pooling_params   row → what to pool
    is_token_id      bool [R, M], False where the position is a prompt embedding; None until a request brings one

    `sparse` and `arrays` list them all, so that moving, swapping and clearing rows are loops over the list.
    """

    __slots__ = ("_rows", "is_token_id", "mm_features", "mrope_positions", "pooling_params", "prompt_embeds")

    def __init__(self) -> None:
        self.prompt_embeds: dict[int, AnyArray] = {}
        self.mm_features: dict[int, tuple[MultiModalFeature, ...]] = {}
        self.mrope_positions: dict[int, I32] = {}
        self.pooling_params: dict[int, PoolingParams] = {}
        self.is_token_id: Bools | None = None
        self._rows: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def sparse(self) -> tuple[dict[int, Any], ...]:
        """Every row → value map."""
        return (self.prompt_embeds, self.mm_features, self.mrope_positions, self.pooling_params)

    def arrays(self) -> list[AnyArray]:
        """Every array whose first axis is the row."""
        return [] if self.is_token_id is None else [self.is_token_id]

    def set(self, row: int, request: NewRequest, shape: tuple[int, int]) -> None:
        """Keep what a request brought. ``shape`` is (R, M)."""
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

    def stage_mrope(self, row: int, positions: I32) -> None:
        """Keep the rotary positions of an admitted request."""
        self._rows.add(row)
        self.mrope_positions[row] = positions

    def clear(self, row: int) -> bool:
        """Forget everything about a row. Whether there was anything."""
        if row not in self._rows:
            return False
        self._rows.remove(row)
        for values in self.sparse():
            values.pop(row, None)
        if self.is_token_id is not None:
            self.is_token_id[row] = True
        return True

    def exchange(self, a: int, b: int) -> None:
        """Swap what two rows have, in the sparse maps (`arrays` move with the states' own)."""
        for values in (*self.sparse(),):
            old = {b: values.pop(a)} if a in values else {}
            if b in values:
                old[a] = values.pop(b)
            values.update(old)
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
    """RequestError for the first value that does not fit the prompt, or is none of its kind."""
    rid = request.req_id

    def require(ok: object, field: str, value: object, reason: str, fix: str) -> None:
        if not ok:
            raise RequestError(rid, field, value, reason, fix)

    embeds, mask, m = request.prompt_embeds, request.prompt_is_token_id, request.mrope_positions
    if embeds is not None:
        shape = shape_of(embeds)
        require(
            len(shape) == 2 and shape[0] == prompt_len, "prompt_embeds", shape, f"must be [{prompt_len}, hidden]",
            "Give one vector a position.",
        )  # fmt: skip
    if mask is not None:
        require(
            embeds is not None and shape_of(mask) == (prompt_len,), "prompt_is_token_id", shape_of(mask),
            f"must be [{prompt_len}], beside prompt_embeds", "Give one truth value a position, or leave it out.",
        )  # fmt: skip
        missing = request.prompt_token_ids is None and np.any(mask)
        require(
            not missing, "prompt_is_token_id", True, "names a token, but prompt_token_ids is missing",
            "Give the token ids.",
        )  # fmt: skip
    for feature in request.mm_features:
        require(hasattr(feature, "check"), "mm_features", feature, "is no MultiModalFeature", "Pass one an image.")
        feature.check(rid, prompt_len)
    require(
        m is None or len(shape_of(m)) == 2, "mrope_positions", m, "must be [dims, tokens]", "Give one row a dimension."
    )
    require(is_int32(request.mrope_delta), "mrope_delta", request.mrope_delta, "is no int32", "Give a whole number.")
    length = request.encoder_len
    require(is_int32(length, 0), "encoder_len", length, "is no number of tokens", "Give 0 for no encoder.")
    pooling = request.pooling_params
    require(pooling is None or hasattr(pooling, "task"), "pooling_params", pooling, "is no PoolingParams", "Pass one.")


def shape_of(values: Any) -> tuple[int, ...]:
    """The shape of an array or of nested lists; () where it has none."""
    try:
        return np.shape(values)
    except ValueError:  # lists of lists of different lengths
        return ()
