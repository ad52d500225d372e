"""Chunked-local attention by ordinary kernels: each chunk that a request's queries touch becomes a request of its own.

With chunks of C tokens a query at position p sees keys p // C · C … p, nothing of earlier chunks. Cut at the chunk
borders, every piece is plain causal attention over one chunk's keys:

    C = 4, computed 2, scheduled 6:     positions  2 3 | 4 5 6 7
    pieces:                             queries 2, keys 4   |   queries 4, keys 4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.features.bidirectional import refuse_ranges
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors, filled, prefix_sum, refuse_spread
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatches:
    """The virtual requests, V of them, in the token order of the step.

    cu_seqlens_q: int32 [V + 1]; seqlens_k: int32 [V], keys of the chunk up to the piece's last query;
    block_table: int32 [V, C / S]; req_indices: int64 [V], the request of each piece. Sum over b of
    ceil((c + n) / C) − c // C pieces: never more than B + T / C + B.
    """

    cu_seqlens_q: I32
    seqlens_k: I32
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: I32
    req_indices: I64


def chunked_local(batch: BatchTensors, chunk_size: int, group: int = 0) -> LocalBatches:
    """Cut the step at multiples of chunk_size, which the group's block size must divide (ConfigError).

    The arrays have stable addresses per chunk size, and are valid as long as the batch is.
    """
    refuse_spread(batch, group, "chunked-local attention")
    refuse_ranges(batch, "chunked-local attention")
    B, S = batch.num_reqs, batch.states.block_tables[group].tokens_per_block
    if chunk_size < 1 or chunk_size % S:
        raise ConfigError(f"chunk_size={chunk_size}: must be a multiple of the group's block_size={S}")
    computed = batch.num_computed_tokens.astype(np.int64)
    end = batch.seq_lens[:B].astype(np.int64)
    first = computed // chunk_size
    pieces = -(-end // chunk_size) - first
    per_chunk = chunk_size // S
    req: I64 = filled(batch, "local_req_indices", np.repeat(np.arange(B), pieces), group, per_chunk)
    chunk = first[req] + ragged_arange(pieces)
    start = np.maximum(computed[req], chunk * chunk_size)
    stop = np.minimum(end[req], (chunk + 1) * chunk_size)
    cu: I32 = prefix_sum(batch, "local_cu_seqlens_q", stop - start, group, per_chunk)
    keys: I32 = filled(batch, "local_seqlens_k", stop - chunk * chunk_size, group, per_chunk)
    table = batch.block_table[group]
    columns = chunk[:, None] * per_chunk + np.arange(per_chunk)
    read = table[req[:, None], np.minimum(columns, table.shape[1] - 1)]
    blocks: I32 = filled(batch, "local_block_table", read, group, per_chunk)
    blocks[columns >= table.shape[1]] = batch.states.null_block
    longest = int((stop - start).max(initial=0))
    return LocalBatches(cu, keys, longest, int(keys.max(initial=0)), blocks, req)
