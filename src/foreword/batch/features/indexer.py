"""Arguments of the kernels of sparse attention, where an indexer chooses the keys that each token attends to:

    keys of the step      a a a a b b b b b b        cu_seqlens_k   0 4 10
    tokens                a2 a3 b5                   key_ranges     (0, 3) (0, 4) (4, 10)

The indexer scores the rows key_ranges[t] for token t; its choice, as positions in the request, becomes slots of the
cache for attention to these keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64, Ints
from foreword.batch.step.tensors import BatchTensors, prefix_sum, refuse_spread
from foreword.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class IndexerInputs:
    """The keys of all requests of a step stand one request after the other: request b's are the rows
    cu_seqlens_k[b] … cu_seqlens_k[b + 1] − 1. Token t sees the rows key_ranges[t, 0] … key_ranges[t, 1] − 1.

    cu_seqlens_k: int32 [B + 1]. key_ranges: int32 [T, 2]; in a group with a sliding window, without the keys below it.
    """

    cu_seqlens_k: I32
    key_ranges: I32


def indexer_inputs(batch: BatchTensors, group: int = 0) -> IndexerInputs:
    """Return the step as an indexer takes it, at stable addresses; valid as long as the batch is. Raise PlanError for a
    group that is spread over ranks.
    """
    refuse_spread(batch, group, "an indexer")
    cu_seqlens_k: I32 = prefix_sum(batch, "cu_seqlens_k", batch.seq_lens[: batch.num_reqs], group)
    positions, window = batch.positions[: batch.num_tokens], batch.states.block_tables[group].group.sliding_window
    ranges: I32 = batch.optional("key_ranges", group)[: batch.num_tokens]
    np.take(cu_seqlens_k, batch.req_indices[: batch.num_tokens], out=ranges[:, 0], mode="clip")
    np.add(ranges[:, 0], positions, out=ranges[:, 1], casting="same_kind")
    ranges[:, 1] += 1
    if window is not None:
        ranges[:, 0] += np.maximum(positions - (window - 1), 0).astype(np.int32)
    return IndexerInputs(cu_seqlens_k, ranges)


def chosen_slots(batch: BatchTensors, chosen: Ints, group: int = 0, out: I64 | None = None) -> I64:
    """Return the cache slots [T, k] of the keys at positions chosen[t] of token t's request; −1 where chosen is −1.

    chosen: integers [T, k]. out: int64 [T, k], written and returned if it is given. Raise PlanError for a position
    after that of its token, and for a group that is spread over ranks.
    """
    refuse_spread(batch, group, "a choice of keys")
    T, positions = batch.num_tokens, batch.positions[: batch.num_tokens]
    if len(chosen) != T:
        raise PlanError("a choice of keys has a row for each token of the step", step=batch.step, tensor="chosen",
                        expected=T, got=len(chosen))  # fmt: skip
    if (late := (chosen > positions[:, None]) | (chosen < -1)).any():
        t, i = (int(n[0]) for n in late.nonzero())
        raise PlanError("a chosen key is not at a position that its token sees", step=batch.step, tensor="chosen",
                        index=t, expected=f"−1 … {positions[t]}", got=int(chosen[t, i]))  # fmt: skip
    table = batch.states.block_tables[group]
    block, offset = np.divmod(chosen, table.tokens_per_block)
    out = np.empty(chosen.shape, np.int64) if out is None else out
    np.multiply(
        batch.block_table[group][batch.req_indices[:T, None], np.maximum(block, 0)], table.group.block_size, out=out
    )
    out += offset
    out[chosen < 0] = -1
    return out
