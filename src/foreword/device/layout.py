"""How the rows lie in the device's arena, and a step in its packet. All of it is int32.

Arena

    tokens   [R, M]       `RequestStates.token_ids`
    records  [R, record]  of each row: progress, sampling parameters (floats as bits), adapter and rotary offset, blocks
                          held per KV group
    tables   [R, K]       of each KV group, `BlockTable.table`; entries past the blocks held hold anything

Packet, for B requests padded to Bp, T tokens, D drafts

    header       [16]      `HEADER`
    rows         [Bp]      row of each request; ~row for a cancelled one; padding 0
    query_start  [Bp + 1]  padding T
    cu_drafts    [Bp + 1]  drafts of the requests before; padding D
    owner        [T]       request of each token
    draft_ids    [D]       −1: not known, read as token 0
    runs         [n, 3]    (to, length, from): arena[to : to + length] = packet[from : from + length]
    payload                what the runs read

native/batch/packet.cpp writes packets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.errors import ConfigError
from foreword.integers import INT32_MAX

HEADER = (
    "num_reqs",
    "num_tokens",
    "num_reqs_padded",
    "num_tokens_padded",
    "num_logits",
    "num_draft_tokens",
    "num_runs",
    "runs_at",
)
HEADER_SIZE = 16
NO_TOKEN = -2
"""In place of the first sample of a request whose logits give no token."""

PROGRESS = ("num_tokens", "num_computed_tokens", "prefill_len", "prompt_len")
SAMPLING = (
    "needs",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",  # two entries, the low one first
)
INPUTS = ("lora_id", "rope_delta")
"""Of a request, set when it is admitted. They are sent with its sampling parameters."""

NUM_TOKENS, NUM_COMPUTED, PREFILL_LEN, PROMPT_LEN = range(4)  # entries of a record
NEEDS, TEMPERATURE, TOP_P, MIN_P, TOP_K, REPETITION, FREQUENCY, PRESENCE, SEED = range(4, 4 + len(SAMPLING))
LORA_ID, ROPE_DELTA = SEED + 2, SEED + 3
_NUM_BLOCKS = ROPE_DELTA + 1

GROUP = (
    "table_at",
    "num_blocks_entry",
    "width",
    "block_size",
    "tokens_per_block",
    "cp_size",
    "cp_rank",
    "cp_interleave",
    "sliding_window",
)
GROUP_SIZE = 16


class RowLayout(NamedTuple):
    """Where the arena of some states has what.

    size: its entries. tokens_at, records_at: the first entry of each. record_size: entries of a record.
    groups: int32 [G, GROUP_SIZE], `GROUP` of each KV group; no sliding window is 0, no slots is rank −1.
    max_packet: entries of a packet that holds any plan, and the changes of at least one row.
    """

    size: int
    tokens_at: int
    records_at: int
    record_size: int
    groups: I32
    max_packet: int

    @classmethod
    def of(cls, states: RequestStates, max_num_batched_tokens: int) -> RowLayout:
        """ConfigError for rows that one arena of 2^31 entries does not hold."""
        R, M, tables = states.max_num_reqs, states.max_model_len, states.block_tables
        record_size = -(-(_NUM_BLOCKS + len(tables)) // 16) * 16
        records_at = R * M
        groups = np.zeros((len(tables), GROUP_SIZE), np.int64)
        end, changes = records_at + R * record_size, 6 + record_size + M
        for g, table in enumerate(tables):
            cp, group = table.context_parallel, table.group
            spread = (cp.size, cp.rank, cp.interleave) if cp is not None else (1, -1 if group.recurrent else 0, 1)
            groups[g, : len(GROUP)] = (
                end, _NUM_BLOCKS + g, table.width, group.block_size, table.tokens_per_block, *spread,
                group.sliding_window or 0,
            )  # fmt: skip
            end += R * table.width
            changes += 7 + table.width
        if end > INT32_MAX:
            raise ConfigError(
                f"max_num_reqs={R}, max_model_len={M}: the rows have {end} entries on the device, the most is "
                f"{INT32_MAX}; use fewer or shorter rows"
            )
        drafts = R * states.max_num_draft_tokens
        plan = HEADER_SIZE + 3 * R + 2 + max_num_batched_tokens + drafts
        return cls(end, 0, records_at, record_size, groups.astype(np.int32), plan + changes + 16 * R)
