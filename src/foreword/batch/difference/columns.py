"""What sender and receiver of differences have in common: the transmitted columns, and the states' geometry."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.batch.state.request_states import RequestStates

# The columns that change while a request lives, with the value of a row without request; transmitted as differences.
PROGRESS = {
    "num_tokens": 0,
    "num_computed_tokens": 0,
    "num_placeholders": 0,
    "num_accepted_tokens": 1,
    "prefill_len": 0,
    "rope_delta": 0,
}
KNOWN, COMPUTED, PREFILL, ROPE = 0, 1, 4, 5
DEFAULT = np.array([[value] for value in PROGRESS.values()], np.int32)
NO_ROWS = np.zeros(0, np.int32)


def as_i32(values: AnyArray) -> I32:
    return np.ascontiguousarray(values, np.int32)


def shared(values: AnyArray) -> AnyArray:
    """The first entry alone where all are equal."""
    return values[:1] if len(values) > 1 and (values == values[0]).all() else values


def checksum_of(progress: I32, num_blocks: I32) -> int:
    return zlib.crc32(num_blocks.tobytes(), zlib.crc32(progress.tobytes()))


def geometry_of(states: RequestStates) -> dict[str, Any]:
    """What both sides must have in common. The rank of a context-parallel group may differ."""
    cp = states.context_parallel
    return {
        "max_num_reqs": states.max_num_reqs,
        "max_model_len": states.max_model_len,
        "vocab_size": states.vocab_size,
        "max_num_draft_tokens": states.max_num_draft_tokens,
        "null_block": states.null_block,
        "context_parallel": None if cp is None else [cp.size, cp.interleave],
        "kv_groups": [
            [g.block_size, g.sliding_window, g.context_parallel, g.recurrent]
            for g in (table.group for table in states.block_tables)
        ],
    }
