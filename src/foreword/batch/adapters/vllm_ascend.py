"""The attention metadata of vllm-ascend: its states, its field names, and its masks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32, I64, AnyArray
from foreword.batch.features.bidirectional import refuse_ranges
from foreword.batch.features.paged import kernel_block_table
from foreword.batch.step.tensors import BatchTensors, refuse_spread
from foreword.batch.values.attention import visible
from foreword.errors import ConfigError, PlanError


class AscendState(Enum):
    """The kinds of step that vllm-ascend's kernels distinguish. `ascend_state` has the rule."""

    PrefillNoCache = 0
    PrefillCacheHit = 1
    DecodeOnly = 2
    ChunkedPrefill = 3
    SpecDecoding = 4


def ascend_state(batch: BatchTensors, *, chunked_prefill: bool = True) -> AscendState:
    """Return the state of the step, with c computed tokens, n scheduled tokens and k drafts per request:

        every c = 0        PrefillNoCache
        every n = 1        DecodeOnly
        every n − k = 1    SpecDecoding
        otherwise          ChunkedPrefill; PrefillCacheHit without chunked prefill

    The first line that holds gives the state. chunked_prefill=False is for vllm-ascend's own scheduler without chunked
    prefill. `AttentionState` has the same names and another rule: it tests drafts first and needs context for a decode.
    """
    n = batch.num_scheduled_tokens
    if not batch.num_computed_tokens.any():
        return AscendState.PrefillNoCache
    if batch.max_query_len == 1:
        return AscendState.DecodeOnly
    if (n - batch.num_draft_tokens == 1).all():
        return AscendState.SpecDecoding
    return AscendState.ChunkedPrefill if chunked_prefill else AscendState.PrefillCacheHit


class AscendMasks:
    """Dense masks of one dtype and one window, in memory that is kept between steps.

    Query position p sees key j where  j ≤ p and (no window or j > p − W).
    bool: True where the query sees the key. A float dtype, to be added to the scores: 0 where it sees it, else −inf.

    causal(size) is a slice of one matrix, which is allocated again only for a larger size. rows(…) is written per step.
    Memory that grows changes its address; after `reserve` for the largest step no address changes.
    """

    __slots__ = ("_causal", "_hidden", "_rows", "_seen", "dtype", "sliding_window")

    def __init__(self, dtype: npt.DTypeLike = np.bool_, sliding_window: int | None = None) -> None:
        """Raise ConfigError for a dtype that is neither bool nor a float."""
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "bf":
            raise ConfigError(f"AscendMasks(dtype={self.dtype.name!r}): expected bool or a float dtype")
        self.sliding_window = sliding_window
        values = [True, False] if self.dtype.kind == "b" else [0.0, -np.inf]
        self._seen, self._hidden = np.array(values, self.dtype)
        self._causal = np.empty((0, 0), self.dtype)
        self._rows = np.empty(0, self.dtype)

    def reserve(self, *, max_query_len: int, max_num_tokens: int, max_seq_len: int) -> None:
        """Allocate for causal(max_query_len) and rows(max_num_tokens positions, max_seq_len)."""
        if max_query_len > len(self._causal):
            self._causal = np.empty((max_query_len, max_query_len), self.dtype)
            self._write(np.arange(max_query_len), self._causal)
        if max_num_tokens * max_seq_len > len(self._rows):
            self._rows = np.empty(max_num_tokens * max_seq_len, self.dtype)

    def causal(self, size: int) -> AnyArray:
        """Return masks [size, size], row p that of query position p: a read-only view of the kept matrix."""
        if size > len(self._causal):
            self.reserve(max_query_len=max(size, 2 * len(self._causal)), max_num_tokens=0, max_seq_len=0)
        return _read_only(self._causal[:size, :size])

    def rows(self, positions: I64, num_keys: int) -> AnyArray:
        """Return rows `positions` of causal(num_keys), [len(positions), num_keys], without allocating that matrix.

        The array is contiguous, read-only, and valid until the next call.
        """
        size = len(positions) * num_keys
        if size > len(self._rows):
            self.reserve(max_query_len=0, max_num_tokens=1, max_seq_len=max(size, 2 * len(self._rows)))
        out = self._rows[:size].reshape(len(positions), num_keys)
        self._write(positions, out)
        return _read_only(out)

    def _write(self, positions: I64, out: AnyArray) -> None:
        """Write out[t, j] = the mask value of query position positions[t] and key j."""
        out[...] = self._hidden
        np.copyto(out, self._seen, where=visible(positions, out.shape[1], self.sliding_window))


def _read_only(view: AnyArray) -> AnyArray:
    view.flags.writeable = False
    return view


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AscendMetadata:
    """One KV group of one step, with vllm-ascend's field names.

    num_reqs B, num_actual_tokens T, num_input_tokens Tp ≥ T (padding of graphs included), max_query_len, max_seq_len.
    query_start_loc int32 [Bp + 1]; query_lens int32 [B]; num_computed_tokens int32 [B]; seq_lens int32 [Bp] = computed
    + scheduled, 0 on padding; block_tables int32 [Bp, K] (kernel blocks where they are smaller); slot_mapping int64
    [Tp], −1 on padding; attn_state as `ascend_state` gives it.
    attn_mask, of the dtype of its `AscendMasks`:
        PrefillNoCache     [max_query_len, max_query_len], one for all requests
        DecodeOnly         None: a query sees every key of its request; a kernel applies a sliding window itself
        any other state    [Tp, max_seq_len], row t for token t; padding has position 0
    """

    num_reqs: int
    num_actual_tokens: int
    num_input_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: I32
    query_lens: I32
    num_computed_tokens: I32
    seq_lens: I32
    block_tables: I32
    slot_mapping: I64
    attn_state: AscendState
    attn_mask: AnyArray | None


def ascend_metadata(
    batch: BatchTensors, group: int = 0, *, masks: AscendMasks | None = None, chunked_prefill: bool = True
) -> AscendMetadata:
    """Return the step's metadata for one KV group, as views that are valid as long as the batch is.

    masks: the object that makes the mask, kept by the caller between steps. Its window must be the group's. None: bool
    masks in new memory. chunked_prefill: see `ascend_state`. Raise PlanError for masks of another window, a group that
    is spread over ranks, and bidirectional ranges.
    """
    refuse_spread(batch, group, "vllm-ascend's metadata")
    refuse_ranges(batch, "vllm-ascend's metadata")
    window = batch.states.block_tables[group].group.sliding_window
    if masks is None:
        masks = AscendMasks(sliding_window=window)
    elif masks.sliding_window != window:
        raise PlanError("masks of another sliding window: use one AscendMasks per window", tensor=f"group {group}",
                        expected=f"sliding_window={window}", got=f"sliding_window={masks.sliding_window}")  # fmt: skip
    state = ascend_state(batch, chunked_prefill=chunked_prefill)
    mask: AnyArray | None
    match state:
        case AscendState.PrefillNoCache:
            mask = masks.causal(batch.max_query_len)
        case AscendState.DecodeOnly:
            mask = None
        case _:
            mask = masks.rows(batch.positions, batch.max_seq_len)
    return AscendMetadata(
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_tokens,
        num_input_tokens=batch.num_tokens_padded,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        query_start_loc=batch.query_start_loc,
        query_lens=batch.num_scheduled_tokens,
        num_computed_tokens=batch.num_computed_tokens,
        seq_lens=batch.seq_lens,
        block_tables=kernel_block_table(batch, group),
        slot_mapping=batch.slot_mapping[group],
        attn_state=state,
        attn_mask=mask,
    )
