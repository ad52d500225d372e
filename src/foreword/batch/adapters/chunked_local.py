"""Chunked-local attention by ordinary kernels: each chunk that a request's queries touch becomes a request of its own.

With chunks of C tokens a query at position p sees keys p // C · C … p, nothing of earlier chunks. Cut at the chunk
borders, every piece is plain causal attention over one chunk's keys:

    C = 4, computed 2, scheduled 6:     positions  2 3 | 4 5 6 7
    pieces:                             queries 2, keys 4   |   queries 4, keys 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.prepare.backends.vectorized import ragged_arange
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatches:
    """The virtual requests, V of them, in the token order of the step.

    cu_seqlens_q: int32 [V + 1]; seqlens_k: int32 [V], keys of the chunk up to the piece's last query;
    block_table: int32 [V, C / S]; req_indices: int64 [V], whose piece it is. Sum over b of
    ceil((c + n) / C) − c // C pieces: never more than B + T / C + B.
    """

    cu_seqlens_q: I32
    seqlens_k: I32
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: I32
    req_indices: I64


def chunked_local(batch: InputBatch, chunk_size: int, group: int = 0) -> LocalBatches:
    """Cut the step at multiples of chunk_size, which the group's block size must divide (ConfigError)."""
    batch.refuse_spread(group, "chunked-local attention")
    B, S = batch.num_reqs, batch.tokens_per_block(group)
    if chunk_size < 1 or chunk_size % S:
        raise ConfigError(f"chunk_size={chunk_size}: must be a multiple of the group's block_size={S}")
    computed = batch.num_computed_tokens.astype(np.int64)
    end = batch.seq_lens[:B].astype(np.int64)
    first = computed // chunk_size
    pieces = -(-end // chunk_size) - first
    req = np.repeat(np.arange(B), pieces)
    chunk = first[req] + ragged_arange(pieces)
    start = np.maximum(computed[req], chunk * chunk_size)
    stop = np.minimum(end[req], (chunk + 1) * chunk_size)
    cu = np.zeros(len(req) + 1, np.int32)
    np.cumsum(stop - start, out=cu[1:])
    keys = (stop - chunk * chunk_size).astype(np.int32)
    per_chunk = chunk_size // S
    table = batch.block_table[group]
    columns = chunk[:, None] * per_chunk + np.arange(per_chunk)
    blocks = np.where(columns < table.shape[1], table[req[:, None], np.minimum(columns, table.shape[1] - 1)], 0)
    return LocalBatches(
        cu,
        keys,
        int((stop - start).max(initial=0)),
        int(keys.max(initial=0)),
        blocks.astype(np.int32, copy=False),
        req,
    )
