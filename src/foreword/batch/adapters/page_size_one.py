"""Token tables: engines whose page holds one token keep the cache slot of every position, not of every block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.step.tensors import BatchTensors, refuse_spread


@dataclass(frozen=True, slots=True, eq=False)
class TokenTables:
    """Request b's key at position p is in slot req_to_token[b, p], for p < seq_lens[b]; 0 past the end
    and where the block is null (below the sliding window).

    req_to_token: int64 [B, max_seq_len]. seq_lens: int32 [B].
    out_cache_loc: int64 [T], where the scheduled tokens' own keys and values go.
    extend_prefix_lens, extend_seq_lens, extend_start_loc: int32 [B], computed and scheduled tokens and first token row.
    """

    req_to_token: I64
    seq_lens: I32
    out_cache_loc: I64
    extend_prefix_lens: I32
    extend_seq_lens: I32
    extend_start_loc: I32


def token_tables(batch: BatchTensors, group: int = 0) -> TokenTables:
    """Return the step as token tables, valid as long as the batch is. Raise PlanError for a group that is spread over
    ranks.
    """
    refuse_spread(batch, group, "a token table")
    B, S = batch.num_reqs, batch.states.block_tables[group].tokens_per_block
    seq_lens, positions = batch.seq_lens[:B], np.arange(batch.max_seq_len)
    slots: I64 = batch.optional("req_to_token", group)[:B, : batch.max_seq_len]
    blocks = batch.block_table[group][:B, positions // S]
    np.multiply(blocks, S, out=slots, dtype=np.int64)
    slots += positions % S
    slots[(positions >= seq_lens[:, None]) | (blocks == batch.states.null_block)] = 0
    return TokenTables(
        slots,
        seq_lens,
        batch.slot_mapping[group][: batch.num_tokens],
        batch.num_computed_tokens,
        batch.num_scheduled_tokens,
        batch.query_start_loc[:B],
    )
