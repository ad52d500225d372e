"""The inputs of attention kernels besides tables: the state of the step, and a dense mask."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from foreword.arrays import I32, I64, Bools


class AttentionState(IntEnum):
    """The kinds of step that attention kernels distinguish. The first condition that holds, in this order, decides.

    SPEC_DECODING       any row has drafts
    DECODE_ONLY         every row is one token over context (num_scheduled = 1, num_computed > 0)
    PREFILL_NO_CACHE    every row starts at 0
    PREFILL_CACHE_HIT   every row reaches the end of its prompt: num_computed < prompt_len <= computed + scheduled
    CHUNKED_PREFILL     any other mix
    """

    PREFILL_NO_CACHE = 0
    PREFILL_CACHE_HIT = 1
    DECODE_ONLY = 2
    CHUNKED_PREFILL = 3
    SPEC_DECODING = 4


def visible(query_positions: I64, num_keys: int, sliding_window: int | None, ranges: I32 | None = None) -> Bools:
    """Return bool [len(p), num_keys]: visible[t, j] = j ≤ p_t and (no window or j > p_t − W), or, with ranges, start_t
    ≤ j < stop_t where (start_t, stop_t) = ranges[t].
    """
    keys = np.arange(num_keys)
    mask = keys <= query_positions[:, None]
    if sliding_window is not None:
        mask &= keys > query_positions[:, None] - sliding_window
    if ranges is not None:
        mask |= (keys >= ranges[:, :1]) & (keys < ranges[:, 1:])
    return mask
