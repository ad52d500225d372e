"""Prefill context parallelism: one step's tokens split among ranks with balanced attention work.

The first tokens of a prompt have few keys and the last ones many. So each request's n scheduled tokens are cut into
2·R chunks, and rank r takes the r-th from the front and the r-th from the back:

    R = 2, n = 8:     0 1 | 2 3 | 4 5 | 6 7          rank 0: 0 1, 6 7        rank 1: 2 3, 4 5

Every token is on exactly one rank. A request becomes up to two rows of a rank, each an ordinary chunk over context:
its keys are all positions before its end, wherever they were computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.features.bidirectional import refuse_ranges
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors, filled, prefix_sum
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class PrefillShare:
    """One rank's part of a step: V rows (pieces of requests) and N tokens, padded to N_max, the largest N of any rank.

    req_indices: int64 [V]. query_start_loc: int32 [V + 1]. seq_lens: int32 [V], keys of the row's last token.
    token_indices: int64 [N_max], the step's tokens that this rank computes, 0 from N on: x_local = x[token_indices].
    restore_indices: int64 [T]: with the ranks' outputs concatenated [R · N_max], y = outputs[restore_indices] is in
    the order of the step again; it is the same on every rank.
    """

    req_indices: I64
    query_start_loc: I32
    seq_lens: I32
    num_tokens: int
    token_indices: I64
    restore_indices: I64


def share_prefill(batch: BatchTensors, size: int, rank: int) -> PrefillShare:
    """Return this rank's share of the step, at own addresses. Chunks are ceil(n / 2R) long, or the request's last ones.
    Raise PlanError if the step has tokens in bidirectional ranges, because a rank's rows have no keys after their own
    tokens.
    """
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(f"share_prefill(size={size}, rank={rank}): rank must be in [0, size)")
    refuse_ranges(batch, "a rank's share")
    tokens, pieces = zip(*(_tokens_of(batch, size, r) for r in range(size)), strict=True)
    longest = max(map(len, tokens))
    restore: I64 = batch.optional("share_restore_indices", size=rank)[: batch.num_tokens]
    for r, here in enumerate(tokens):
        restore[here] = r * longest + np.arange(len(here))
    req, start, stop = pieces[rank]
    req_indices: I64 = filled(batch, "share_req_indices", req, size=rank)
    loc: I32 = prefix_sum(batch, "share_query_start_loc", stop - start, size=rank)
    token_indices: I64 = batch.optional("share_token_indices", size=rank)[:longest]
    token_indices[: len(tokens[rank])] = tokens[rank]
    token_indices[len(tokens[rank]) :] = 0
    seq_lens: I32 = filled(batch, "share_seq_lens", batch.num_computed_tokens[req] + stop, size=rank)
    return PrefillShare(req_indices, loc, seq_lens, len(tokens[rank]), token_indices, restore)


def _tokens_of(batch: BatchTensors, size: int, rank: int) -> tuple[I64, tuple[I64, I64, I64]]:
    """Return (token rows, (request, first, end of each piece inside its request)) of one rank, in the order of the
    step.
    """
    n = batch.num_scheduled_tokens.astype(np.int64)
    chunk = -(-n // (2 * size))
    which = np.array([rank, 2 * size - 1 - rank])
    start = np.minimum(which * chunk[:, None], n[:, None]).reshape(-1)
    stop = np.minimum((which + 1) * chunk[:, None], n[:, None]).reshape(-1)
    some = stop > start
    req = np.repeat(np.arange(len(n)), 2)[some]
    start, stop = start[some], stop[some]
    first = batch.query_start_loc[req].astype(np.int64) + start
    lens = stop - start
    return np.repeat(first, lens) + ragged_arange(lens), (req, start, stop)
