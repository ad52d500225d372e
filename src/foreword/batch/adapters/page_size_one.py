"""Token tables: engines whose page holds one token keep the cache slot of every position, not of every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32, I64

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenTables:
    """Request b's key at position p is in slot req_to_token[b, p], for p < seq_lens[b]; 0 past the end.

    req_to_token: int64 [B, max_seq_len]. seq_lens: int32 [B].
    out_cache_loc: int64 [T], where the scheduled tokens' own keys and values go.
    extend_prefix_lens, extend_seq_lens, extend_start_loc: int32 [B], computed and scheduled tokens and the first
    token row of each request.
    """

    req_to_token: I64
    seq_lens: I32
    out_cache_loc: I64
    extend_prefix_lens: I32
    extend_seq_lens: I32
    extend_start_loc: I32


def token_tables(batch: InputBatch, group: int = 0) -> TokenTables:
    """The step as token tables. Copies: it stays true after the next step. PlanError for a group spread over ranks."""
    batch.refuse_spread(group, "a token table")
    B, S = batch.num_reqs, batch.tokens_per_block(group)
    seq_lens = batch.seq_lens[:B].copy()
    positions = np.arange(batch.max_seq_len)
    table = batch.block_table[group][:B, : -(-batch.max_seq_len // S)].astype(np.int64)
    slots = table[:, positions // S] * S + positions % S
    slots[positions >= seq_lens[:, None]] = 0
    return TokenTables(
        slots,
        seq_lens,
        batch.slot_mapping[group][: batch.num_tokens].copy(),
        batch.num_computed_tokens.copy(),
        batch.num_scheduled_tokens.copy(),
        batch.query_start_loc[:B].copy(),
    )
