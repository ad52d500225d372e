"""The inputs of a decoder's layers in a step, as tensors on its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.arrays import I32, I64, Ints
from foreword.batch import InputBatch
from foreword.executors.torch.attention import PagedAttention
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.rotation import Rotation
from foreword.executors.torch.tensors import as_tensor
from foreword.models.spec import DecoderSpec, QueryGrowth, RopeSpec


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of a step of T tokens.

    positions: int64 [T]. embeds: int64 [N] tokens and their vectors [N, hidden] in place of embedding rows. loras: None
    without adapters.
    """

    input_ids: Tensor
    positions: Tensor
    embeds: tuple[Tensor, Tensor] | None
    loras: ProductChanges | None


@dataclass(frozen=True, slots=True)
class PagedStep(Step):
    """A step over paged keys and values.

    attention: it has begun the step. rotations: of the tokens' positions. recurrent: None without recurrent layers.
    growths: of the tokens' queries, [T, 1, 1].
    """

    attention: PagedAttention
    rotations: Mapping[RopeSpec, Rotation]
    recurrent: RecurrentStep | None
    growths: Mapping[QueryGrowth, Tensor]


def query_growths(spec: DecoderSpec) -> set[QueryGrowth]:
    """Return the growths of queries that layers of a model have."""
    return {layer.query_growth for layer in spec.layers if layer.query_growth is not None}


def growth_factors(growth: QueryGrowth, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of queries at positions [T], [T, 1, 1]."""
    steps = torch.div(positions + growth.offset, growth.interval, rounding_mode="floor").float()
    return (1 + growth.scale * torch.log1p(steps)).to(dtype)[:, None, None]


class RecurrentStep:
    """The order in which recurrent layers compute a step, and the blocks of their states.

    Requests are sorted by their number of tokens, most first; tokens by their number t within the request, and for
    equal t by request. So the t-th tokens are rows [begins[t], begins[t + 1]), of the first requests.

    The states that are kept are those after the last token of each request, in their order, then those before drafts,
    by t and by request.

    states: of each recurrent layer, float32 [number, state_size]. read: of each recurrent KV group, the entries with
    the states that the step starts from, int64 [requests]; written: those of the states that are kept, int64 [kept].
    before_drafts: by t, the requests with a draft after token t, int64. is_new: whether nothing is computed of a
    request yet. tokens: int64 [T], the batch's token of each row.
    """

    def __init__(self, batch: InputBatch, cache: PagedCache, device: torch.device) -> None:
        lengths = batch.num_scheduled_tokens
        order = np.argsort(-lengths, kind="stable")
        self._lengths = lengths[order].astype(np.int64)
        counts = len(lengths) - np.searchsorted(self._lengths[::-1], np.arange(self._lengths[0]), side="right")
        self._begins = np.concatenate([[0], np.cumsum(counts)])
        self._at = np.repeat(np.arange(len(counts)), counts)  # t of each row
        self._request = np.arange(len(self._at)) - self._begins[self._at]
        self._indices: dict[int, tuple[Tensor, Tensor]] = {}
        self.states, self._first, self.begins, self._device = (
            cache.states,
            cache.first_state,
            self._begins.tolist(),
            device,
        )
        self.tokens = as_tensor(batch.query_start_loc[order][self._request] + self._at, device)
        self.is_new = as_tensor(batch.num_computed_tokens[order] == 0, device)
        rows, num_drafts = batch.idx_mapping[order], batch.num_draft_tokens[order].astype(np.int64)
        drafted = np.repeat(np.arange(len(rows)), num_drafts)  # the request of each draft
        nth = np.arange(len(drafted)) - (np.cumsum(num_drafts) - num_drafts)[drafted]
        before = (self._lengths - num_drafts)[drafted] + nth - 1  # t of the token before it
        by_t = np.lexsort((drafted, before))
        drafted, nth, before = drafted[by_t], nth[by_t], before[by_t]
        self._kept = np.concatenate([np.arange(len(rows)), drafted])
        self._kept_lengths = np.concatenate([self._lengths, before + 1])
        self.before_drafts = {t: as_tensor(drafted[before == t], device) for t in np.unique(before).tolist()}
        self.read = self._blocks(batch, rows, batch.states.num_accepted_tokens[rows] - 1)
        self.written = self._blocks(batch, rows[self._kept], np.concatenate([num_drafts, nth]))

    def _blocks(self, batch: InputBatch, rows: I32, entries: Ints) -> dict[int, Tensor]:
        """Return these entries of the rows in the block table of each recurrent KV group."""
        tables = {g: table.table for g, table in enumerate(batch.states.block_tables) if table.group.recurrent}
        return {
            g: as_tensor(table[rows, entries].astype(np.int64) - self._first, self._device)
            for g, table in tables.items()
        }

    def convolution(self, kernel: int) -> tuple[Tensor, Tensor]:
        """Return, for a convolution over ``kernel`` inputs, the inputs of each row int64 [T, kernel], and those that
        the state
        keeps, int64 [kept, kernel − 1]. They are numbers of rows: first of the inputs kept so far
        [requests · (kernel − 1)], then of the step's [T].
        """
        if kernel not in self._indices:
            window, kept = np.arange(kernel) - (kernel - 1), np.arange(kernel - 1) - (kernel - 1)
            self._indices[kernel] = (
                self._rows(self._at[:, None] + window, self._request[:, None], kernel - 1),
                self._rows(self._kept_lengths[:, None] + kept, self._kept[:, None], kernel - 1),
            )
        return self._indices[kernel]

    def _rows(self, at: I64, request: I64, past: int) -> Tensor:
        """Return the rows of the inputs at t = at, which are among the ``past`` kept ones of a request if negative."""
        here = len(self._lengths) * past + self._begins[np.maximum(at, 0)] + request
        return as_tensor(np.where(at < 0, request * past + past + at, here), self._device)
