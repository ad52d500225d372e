"""Multimodal prompts: which encoder outputs a step needs, and where their rows go.

A feature (an image, a clip) is a run of placeholder tokens in the prompt. A step computes some of them, possibly from
the middle of an image on; `mm_inputs` gives the encoder rows of those tokens.

Features are for executors of your own with `Capability.MULTIMODAL`, which run an encoder in their steps. Foreword's
executors refuse them by name: its engine encodes images before admission and passes their vectors as prompt embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64, Bools, Ints
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import RequestError


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
    """The encoder outputs that a step reads.

    slices: the outputs it needs, in batch order, then prompt order. With E = their rows, concatenated [N, hidden]:
    inputs_embeds[token_indices] = E.
    is_mm_embed: bool [Tp], True at the tokens that read an encoder row. token_indices: int64 [N], where it is True.
    """

    slices: tuple[EncoderSlice, ...]
    is_mm_embed: Bools
    token_indices: I64

    @property
    def identifiers(self) -> tuple[str, ...]:
        """The encoder outputs that this step reads, each once, in order of first use."""
        return tuple(dict.fromkeys(s.identifier for s in self.slices))


def mm_inputs(batch: BatchTensors) -> MultiModalInputs:
    """Cut every feature of the scheduled requests to the tokens of this step.

    For request b with c computed and n scheduled tokens, and a feature at [o, o + l): positions
    max(c, o) … min(c + n, o + l) − 1, as far as they are embedded, read the encoder rows of the same rank.
    Costs O(features of the scheduled requests + Tp).
    """
    mask = batch.optional("is_mm_embed")[: batch.num_tokens_padded]
    mask[:] = False
    slices: list[EncoderSlice] = []
    features = batch.states.extras.mm_features
    start_loc, computed, scheduled = batch.query_start_loc, batch.num_computed_tokens, batch.num_scheduled_tokens
    for b in prefilling_with(features, batch):
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


def prefilling_with(by_row: Mapping[int, object], batch: BatchTensors) -> list[int]:
    """Return the batch indices of the requests that compute tokens known at admission and whose row has an entry, in
    order.
    """
    if not by_row:
        return []
    rows = batch.idx_mapping
    return [b for b in np.flatnonzero(batch.is_prefilling).tolist() if int(rows[b]) in by_row]


def mrope_positions(batch: BatchTensors, num_dims: int = 3) -> I64:
    """Return the rotary positions of num_dims dimensions, int64 [num_dims, Tp], 0 on padding.

    For a token at position p of a request that was admitted with mrope_positions m [num_dims, n]:
        m[d, p] if p < n, else p + rope_delta
    and p in every dimension for a request without: text.
    """
    T = batch.num_tokens
    out: I64 = batch.optional("mrope_positions", size=num_dims)[:, : batch.num_tokens_padded]
    positions, rows = batch.positions[:T], batch.idx_mapping
    out[:, T:] = 0
    out[:, :T] = positions + batch.states.rope_delta[rows][batch.req_indices]
    start_loc, computed = batch.query_start_loc, batch.num_computed_tokens
    staged = batch.states.extras.mrope_positions
    for b in prefilling_with(staged, batch):
        m, c = staged[int(rows[b])], int(computed[b])
        if len(m) != num_dims:
            reason = f"has {len(m)} dimensions, the model {num_dims}"
            raise RequestError(batch.req_ids[b], "mrope_positions", m.shape, reason, "Give one row per dimension.")
        n = min(int(start_loc[b + 1] - start_loc[b]), m.shape[1] - c)
        if n > 0:
            out[:, start_loc[b] : start_loc[b] + n] = m[:, c : c + n]
    return out


def stage_mrope_positions(states: RequestStates, req_id: str, positions: Ints, delta: int) -> None:
    """Give an admitted request its rotary positions, int32 [dims, n], as `NewRequest.mrope_positions` would: for
    engines whose model computes them from the prompt. Raise RequestError for another shape, or more tokens than were
    known.
    """
    row, shape = states.row_of(req_id), np.shape(positions)
    known = int(states.prefill_len[row])
    if len(shape) != 2 or shape[1] > known:
        limit = f"must be [dims, tokens] of at most the {known} tokens known at admission"
        raise RequestError(req_id, "positions", shape, limit, "Give one row per dimension.")
    states.extras.stage_mrope(row, np.ascontiguousarray(positions, np.int32))
    states.rope_delta[row] = delta


def encoder_seq_lens(batch: BatchTensors) -> I32:
    """Return the cross-attention lengths, int32 [Bp]: each request's encoder_len in every one of its steps; 0 on
    padding.
    """
    out: I32 = batch.optional("encoder_seq_lens")[: batch.num_reqs_padded]
    out[: batch.num_reqs] = batch.states.encoder_len[batch.idx_mapping]
    out[batch.num_reqs :] = 0
    return out
