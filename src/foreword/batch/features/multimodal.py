"""Multimodal prompts: which encoder outputs a step needs, and where their rows go.

A feature (an image, a clip) stands in the prompt as a run of placeholder tokens. A step computes some of them, maybe
from the middle of an image to its end; `mm_inputs` says which encoder rows those are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32, I64, Bools, Ints
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalFeature:
    """One encoder input of a prompt.

    identifier: what the encoder cache calls its output (a content hash).
    offset, length: the placeholder range [offset, offset + length) of prompt positions.
    is_embed: bool [length], False where a position of the range keeps its token (a separator); None: all are embedded.
    The encoder output has one row for each embedded position, in order.
    """

    identifier: str
    offset: int
    length: int
    is_embed: Bools | None = None
    modality: str = "image"

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder output."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def check(self, req_id: str, prompt_len: int) -> None:
        """RequestError for a range outside the prompt or a mask of another length."""
        if self.offset < 0 or self.length < 1 or self.offset + self.length > prompt_len:
            raise RequestError(
                req_id, "mm_features", (self.offset, self.length), f"is no range of the prompt's {prompt_len} tokens",
                "Give the placeholder range as it stands in prompt_token_ids.",
            )  # fmt: skip
        if self.is_embed is not None and np.shape(self.is_embed) != (self.length,):
            raise RequestError(
                req_id, "mm_features", np.shape(self.is_embed), f"is_embed must have {self.length} entries",
                "Give one truth value a placeholder.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderSlice:
    """Rows [start, stop) of one feature's encoder output, read by request ``batch_index`` in this step."""

    batch_index: int
    feature_index: int
    identifier: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalInputs:
    """What a step takes from encoder outputs.

    slices: the outputs it needs, in batch order, then prompt order. With E = their rows, concatenated [N, hidden]:
    inputs_embeds[token_indices] = E.
    is_mm_embed: bool [Tp], True at the tokens that take an encoder row. token_indices: int64 [N], where it is True.
    """

    slices: tuple[EncoderSlice, ...]
    is_mm_embed: Bools
    token_indices: I64

    @property
    def identifiers(self) -> tuple[str, ...]:
        """The encoder outputs this step reads, each once, in order of first use."""
        return tuple(dict.fromkeys(s.identifier for s in self.slices))


def mm_inputs(states: RequestStates, batch: InputBatch) -> MultiModalInputs:
    """Cut every feature of the scheduled requests to the tokens of this step.

    For request b with c computed and n scheduled tokens, and a feature at [o, o + l): positions
    max(c, o) … min(c + n, o + l) − 1, as far as they are embedded, take the encoder rows of the same rank.
    Costs O(features of the scheduled requests + Tp).
    """
    mask = np.zeros(batch.num_tokens_padded, np.bool_)
    slices: list[EncoderSlice] = []
    features = states.extras.mm_features
    start_loc, computed, scheduled = batch.query_start_loc, batch.num_computed_tokens, batch.num_scheduled_tokens
    for b in requests_with(features, batch.idx_mapping):
        c, first = int(computed[b]), int(start_loc[b])
        end = c + int(scheduled[b])
        for i, f in enumerate(features[int(batch.idx_mapping[b])]):
            low, high = max(c, f.offset), min(end, f.offset + f.length)
            if low >= high:
                continue
            if f.is_embed is None:
                start, stop = low - f.offset, high - f.offset
                mask[first + low - c : first + high - c] = True
            else:
                embedded = np.asarray(f.is_embed, np.bool_)
                here = embedded[low - f.offset : high - f.offset]
                start = int(np.count_nonzero(embedded[: low - f.offset]))
                stop = start + int(np.count_nonzero(here))
                mask[first + low - c : first + high - c] = here
            if stop > start:
                slices.append(EncoderSlice(b, i, f.identifier, start, stop))
    return MultiModalInputs(tuple(slices), mask, np.flatnonzero(mask))


def requests_with(by_row: Mapping[int, object], rows: I32) -> list[int]:
    """The batch indices of the rows that have an entry, in batch order; free where nobody has one."""
    if not by_row:
        return []
    return [b for b, row in enumerate(rows.tolist()) if row in by_row]


def mrope_positions(states: RequestStates, batch: InputBatch, num_dims: int) -> I64:
    """Rotary positions of num_dims dimensions, int64 [num_dims, Tp], 0 on padding.

    For a token at position p of a request that was admitted with mrope_positions m [num_dims, n]:
        m[d, p] if p < n, else p + rope_delta
    and p in every dimension for a request without: text.
    """
    T = batch.num_tokens
    out = np.zeros((num_dims, batch.num_tokens_padded), np.int64)
    positions, rows = batch.positions[:T], batch.idx_mapping
    out[:, :T] = positions + states.rope_delta[rows][batch.req_indices]
    start_loc, computed = batch.query_start_loc, batch.num_computed_tokens
    staged = states.extras.mrope_positions
    for b in requests_with(staged, rows):
        m, c = staged[int(rows[b])], int(computed[b])
        if len(m) != num_dims:
            raise RequestError(
                batch.req_ids[b], "mrope_positions", m.shape, f"has {len(m)} dimensions, the model {num_dims}",
                "Give one row a dimension.",
            )  # fmt: skip
        n = min(int(start_loc[b + 1] - start_loc[b]), m.shape[1] - c)
        if n > 0:
            out[:, start_loc[b] : start_loc[b] + n] = m[:, c : c + n]
    return out


def stage_mrope_positions(states: RequestStates, req_id: str, positions: Ints, delta: int) -> None:
    """Give an admitted request its rotary positions, int32 [dims, n], as `NewRequest.mrope_positions` would: for
    engines whose model computes them from the prompt.
    """
    if np.ndim(positions) != 2:
        raise RequestError(req_id, "positions", np.shape(positions), "must be [dims, tokens]", "One row a dimension.")
    row = states.row_of(req_id)
    states.extras.stage_mrope(row, np.ascontiguousarray(positions, np.int32))
    states.rope_delta[row] = delta


def encoder_seq_lens(states: RequestStates, batch: InputBatch) -> I32:
    """Cross-attention lengths, int32 [Bp]: each request's encoder_len in every one of its steps; 0 on padding."""
    out = np.zeros(batch.num_reqs_padded, np.int32)
    out[: batch.num_reqs] = states.encoder_len[batch.idx_mapping]
    return out
