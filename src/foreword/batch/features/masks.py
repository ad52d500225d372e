"""Dense masks and per-request masks of a step."""

from __future__ import annotations

import numpy as np

from foreword.arrays import Bools
from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.attention import AttentionState, visible


def attention_mask(batch: BatchTensors, group: int = 0) -> Bools | None:
    """Return a new dense mask, True = visible. For PREFILL_NO_CACHE it is one mask [max_query_len, max_query_len] for
    all requests, and for DECODE_ONLY it is None. Otherwise, and if a token is in a bidirectional range, it is [T,
    max_seq_len]: token t attends to the keys of its request up to its position, and to those of its range.
    """
    if batch.attention_state is AttentionState.DECODE_ONLY:
        return None
    window, ranges = batch.states.block_tables[group].group.sliding_window, bidirectional_ranges(batch)
    if ranges is None and batch.attention_state is AttentionState.PREFILL_NO_CACHE:
        return visible(np.arange(batch.max_query_len), batch.max_query_len, window)
    T = batch.num_tokens
    return visible(batch.positions[:T], batch.max_seq_len, window, None if ranges is None else ranges[:T])


def discard_mask(batch: BatchTensors) -> Bools:
    """Return bool [Bp]: whether the request's sample of this step is discarded, because known tokens remain to be
    computed.

    discard[b] = num_computed[b] + num_scheduled[b] − num_drafts[b] < num_tokens[b] + num_placeholders[b]

    It is True for padding and for requests that were removed since. Call it before the step is advanced or committed.
    """
    states, B, rows = batch.states, batch.num_reqs, batch.idx_mapping
    out: Bools = batch.optional("discard_mask")[: batch.num_reqs_padded]
    known = states.num_tokens[rows] + states.num_placeholders[rows]
    np.less(batch.seq_lens[:B] - batch.num_draft_tokens, known, out=out[:B])
    out[:B] |= batch.row_generation != states.row_generation[rows]
    out[B:] = True
    return out
