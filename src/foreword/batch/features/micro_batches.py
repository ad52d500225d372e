"""A step cut into micro-batches, so that one computes while another one's tokens are exchanged between devices.

The cut is between any two tokens. A request on both sides of a cut is a row of both micro-batches: first a chunk that
ends at the cut, then a chunk over what the first one wrote:

    tokens    0 1 2 | 3 4 5 6 7 | 8            requests a b c, cut at 5
    first     a a a   b b                      query_start_loc 0 3 5
    second                b b b   c            query_start_loc 0 3 4

Keys and values of a micro-batch are written before the attention of a later one reads them, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.step.tensors import BatchTensors, filled, prefix_sum
from foreword.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tokens first … end − 1 of a step as a batch of their own: b requests, t tokens, l logit rows.

    With j = requests.start + i, s = query_start_loc of the step, q = max(s[j], first), e = min(s[j + 1], end):

        query_start_loc[i + 1] = query_start_loc[i] + e − q       num_computed_tokens[i] = c[j] + q − s[j]
        seq_lens[i] = c[j] + e − s[j]                             logits_indices[i] = x[logits.start + i] − first

    where c and x are the step's num_computed_tokens and logits_indices: a request has its row of logits where its last
    token is. requests, tokens, logits: where they are in the step; the logit rows of
    all micro-batches, one after the other, are those of the step. query_start_loc: int32 [b + 1]; num_computed_tokens,
    seq_lens: int32 [b]; logits_indices: int64 [l]; these are at addresses of their own, which stay. The others are
    views of the step's tensors: input_ids: int32 [t]; positions: int64 [t]; slot_mapping: int64 [t] per KV group;
    block_table: int32 [b, K] per KV group, () of a step that did not gather them.
    """

    requests: slice
    tokens: slice
    logits: slice
    query_start_loc: I32
    num_computed_tokens: I32
    seq_lens: I32
    logits_indices: I64
    input_ids: I32
    positions: I64
    slot_mapping: tuple[I64, ...]
    block_table: tuple[I32, ...]
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        return int(self.requests.stop - self.requests.start)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


def micro_batches(batch: BatchTensors, cuts: Sequence[int]) -> list[MicroBatch]:
    """Return the micro-batches of a step that is cut before each of these tokens; valid as long as the batch is.

    cuts: ascending, in [1, T − 1]; PlanError for others, and for one inside a bidirectional range. Two equal halves:
    ``[batch.num_tokens // 2]``; at the border of request b: ``[int(batch.query_start_loc[b])]``. Padding is in no
    micro-batch; a step without tokens has none.
    """
    if not (batch.num_tokens or cuts):
        return []
    borders = [0, *cuts, batch.num_tokens]
    for first, end in pairwise(borders):
        if first >= end:
            raise PlanError("the cuts of a step must be ascending and leave a token to each micro-batch",
                            step=batch.step, tensor="cuts", expected=f"between 1 and {batch.num_tokens - 1}",
                            got=list(cuts))  # fmt: skip
    if (ranges := bidirectional_ranges(batch)) is not None:
        _refuse_cuts_inside(batch, ranges, cuts)
    return [_micro_batch(batch, i, first, end) for i, (first, end) in enumerate(pairwise(borders))]


def _refuse_cuts_inside(batch: BatchTensors, ranges: I32, cuts: Sequence[int]) -> None:
    for cut in cuts:
        b, (start, stop) = int(batch.req_indices[cut]), ranges[cut]
        if start < min(stop, batch.positions[cut]) and cut > batch.query_start_loc[b]:
            raise PlanError("a cut inside a bidirectional range, whose tokens see each other", step=batch.step,
                            request=batch.req_ids[b], tensor="cuts", got=cut)  # fmt: skip


def _micro_batch(batch: BatchTensors, number: int, first: int, end: int) -> MicroBatch:
    starts = batch.query_start_loc[: batch.num_reqs + 1]
    begin = int(starts.searchsorted(first, "right")) - 1
    requests, tokens = slice(begin, int(starts.searchsorted(end, "left"))), slice(first, end)
    rows = batch.logits_indices.searchsorted((first, end))
    logits = slice(int(rows[0]), int(rows[1]))
    begins, ends = starts[:-1][requests], starts[1:][requests]
    computed = batch.num_computed_tokens[requests]
    q, e = np.maximum(begins, first), np.minimum(ends, end)
    seq_lens: I32 = filled(batch, "micro_seq_lens", computed + (e - begins), size=number)
    return MicroBatch(
        requests=requests,
        tokens=tokens,
        logits=logits,
        query_start_loc=prefix_sum(batch, "micro_query_start_loc", e - q, size=number),
        num_computed_tokens=filled(batch, "micro_num_computed_tokens", computed + (q - begins), size=number),
        seq_lens=seq_lens,
        logits_indices=filled(batch, "micro_logits_indices", batch.logits_indices[logits] - first, size=number),
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        slot_mapping=tuple(slots[tokens] for slots in batch.slot_mapping),
        block_table=tuple(table[requests] for table in batch.block_table) if batch.is_gathered else (),
        max_query_len=int((e - q).max()),
        max_seq_len=int(seq_lens.max()),
    )
