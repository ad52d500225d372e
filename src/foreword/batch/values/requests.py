"""What the scheduler says when it admits a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32, AnyArray, Bools, Floats, Ints
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.batch.features.multimodal import MultiModalFeature
    from foreword.batch.features.pooling import PoolingParams
    from foreword.batch.values.sampling_params import SamplingParams

TokenIds = Sequence[int] | Ints


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A request as admitted, new or resumed (a resumed one brings the outputs it had).

    block_ids: one list of physical blocks per KV group, covering the cached prefix and what is allocated so far.
    num_computed_tokens: tokens whose KV is already in those blocks (a prefix hit); fewer than prompt + outputs.
    prompt_embeds: [prompt_len, hidden] in place of prompt_token_ids (None), or beside them with
    prompt_is_token_id [prompt_len] bool saying which positions are tokens.
    mm_features: the encoder inputs of the prompt. mrope_positions: int32 [dims, tokens], rotary positions of the first
    tokens; mrope_delta: what later tokens add to their position. encoder_len: tokens of an encoder-decoder's encoder.
    pooling_params: what to make of the hidden states, in place of sampling_params.
    """

    req_id: str
    prompt_token_ids: TokenIds | None
    block_ids: Sequence[TokenIds]
    output_token_ids: TokenIds = ()
    num_computed_tokens: int = 0
    sampling_params: SamplingParams | None = None
    lora_id: int = 0
    prompt_embeds: Floats | None = None
    prompt_is_token_id: Bools | None = field(default=None, kw_only=True)
    mm_features: Sequence[MultiModalFeature] = field(default=(), kw_only=True)
    mrope_positions: Ints | None = field(default=None, kw_only=True)
    mrope_delta: int = field(default=0, kw_only=True)
    encoder_len: int = field(default=0, kw_only=True)
    pooling_params: PoolingParams | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NewRequests:
    """Many arrivals as columns, for `RequestStates.add_requests`: N requests, nothing of Python's per request.

    token_ids: int32, every request's known tokens (prompt, then outputs), one request after the other.
    num_tokens: int32 [N], how many of them are request i's. prompt_len: int32 [N]; None: all of them are prompt.
    block_ids, num_blocks: one array a KV group, in the same way. num_computed_tokens: int32 [N]; None: 0.
    sampling: column name (as in `sampling_columns.COLUMNS`) → [N]; columns not named keep the default (greedy).
    """

    req_ids: Sequence[str]
    token_ids: I32
    num_tokens: I32
    block_ids: Sequence[I32]
    num_blocks: Sequence[I32]
    prompt_len: I32 | None = None
    num_computed_tokens: I32 | None = None
    lora_id: I32 | None = None
    sampling: Mapping[str, npt.NDArray[np.generic]] | None = None

    def check_columns(self) -> None:
        """RequestError for a column of ``sampling`` or ``lora_id`` that is unknown or has not one entry a request."""
        for name, column in (self.sampling or {}).items():
            if name not in _GIVEN:
                raise RequestError(None, "sampling", name, "is no column", f"Use one of {', '.join(sorted(_GIVEN))}.")
            _one_each(name, column, len(self.req_ids))
        if self.lora_id is not None:
            _one_each("lora_id", self.lora_id, len(self.req_ids))

    def split(self) -> list[NewRequest]:
        """The same as one `NewRequest` each (without ``sampling``, which has no parameters object).

        RequestError for columns that do not have one entry a request, or that do not add up.
        """
        count = len(self.req_ids)
        num_tokens = _one_each("num_tokens", self.num_tokens, count)
        prompt_len = num_tokens if self.prompt_len is None else _one_each("prompt_len", self.prompt_len, count)
        computed = np.zeros(count, np.int32)
        if self.num_computed_tokens is not None:
            computed = _one_each("num_computed_tokens", self.num_computed_tokens, count)
        if len(self.block_ids) != len(self.num_blocks):
            raise RequestError(
                None, "num_blocks", f"{len(self.num_blocks)} arrays", f"block_ids has {len(self.block_ids)}",
                "Give one of either for each KV group.",
            )  # fmt: skip
        if ((prompt_len < 1) | (prompt_len > num_tokens)).any():
            i = int(np.argmax((prompt_len < 1) | (prompt_len > num_tokens)))
            raise RequestError(
                self.req_ids[i], "prompt_len", int(prompt_len[i]),
                f"must be in [1, num_tokens = {int(num_tokens[i])}]", "Count the prompt's own tokens.",
            )  # fmt: skip
        tokens = _pieces("token_ids", self.token_ids, "num_tokens", num_tokens)
        blocks = []
        for g, (ids, held) in enumerate(zip(self.block_ids, self.num_blocks, strict=True)):
            name = f"num_blocks[{g}]"
            blocks.append(_pieces(f"block_ids[{g}]", ids, name, _one_each(name, held, count)))
        return [
            NewRequest(
                req_id,
                tokens[i][: prompt_len[i]],
                [group[i] for group in blocks],
                tokens[i][prompt_len[i] :],
                int(computed[i]),
                lora_id=0 if self.lora_id is None else int(self.lora_id[i]),
            )
            for i, req_id in enumerate(self.req_ids)
        ]


_GIVEN = COLUMNS.keys() - {"needs"}  # what a row needs follows from the others


def _one_each(name: str, column: npt.ArrayLike, count: int) -> AnyArray:
    """The column as an array [count]; RequestError for another shape."""
    values = np.asarray(column)
    if values.shape != (count,):
        raise RequestError(None, name, f"shape {values.shape}", f"there are {count} requests", "Give one entry each.")
    return values


def _pieces(name: str, values: npt.ArrayLike, count_name: str, counts: AnyArray) -> list[AnyArray]:
    """values cut into pieces of counts[i] entries; RequestError where they do not add up."""
    flat = np.asarray(values)
    if (counts < 0).any() or int(counts.sum()) != flat.size or flat.ndim != 1:
        raise RequestError(
            None, name, f"shape {flat.shape}", f"{count_name} adds up to {int(counts.sum())}, none below 0",
            "Make them agree.",
        )  # fmt: skip
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
