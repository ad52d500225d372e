"""Ranges of a prompt whose tokens attend to each other, inside an otherwise causal mask: the images of some models, the
prefix of a prefix-LM.

    prompt   t t i i i t        bidirectional_ranges=[(2, 5)]        t0  x . . . . .
                                                                     t1  x x . . . .
    A query of the range sees its keys too, and those before         i2  x x x x x .
    the range, too; the others see what a causal mask shows.      i3  x x x x x .
                                                                     i4  x x x x x .
                                                                     t5  x x x x x x

So all keys of a range must be there when a query of it is computed: no step ends inside a range.
"""

from __future__ import annotations

from collections.abc import Iterator

from foreword.arrays import I32
from foreword.batch.features.multimodal import prefilling_with
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import PlanError


def bidirectional_ranges(batch: BatchTensors) -> I32 | None:
    """Return int32 [Tp, 2], the range [start, stop) that contains each token, (0, 0) for tokens outside of ranges and
    for padding. Return None if no token of the step is in a range.

    With p = positions[t] and (start, stop) = out[t], query t sees the key at position j of its request where

        j ≤ p and (no window W or j > p − W)   or   start ≤ j < stop

    PlanError for a step that ends inside a range, since keys to which its queries attend would be missing, and for a
    step that begins so far inside a range that a group's sliding window has passed its start. It costs O(requests of
    the step with ranges + Tp).
    """
    out: I32 | None = None
    for b, ranges in ranges_of_requests(batch):
        first, c = int(batch.query_start_loc[b]), int(batch.num_computed_tokens[b])
        for start, stop in ranges.tolist():
            if out is None:
                out = batch.optional("bidirectional_ranges")[: batch.num_tokens_padded]
                out[:] = 0
            out[first + max(start - c, 0) : first + stop - c] = start, stop
    return out


def ranges_of_requests(batch: BatchTensors) -> Iterator[tuple[int, I32]]:
    """Yield (batch index, int32 [n, 2]) of each request with a token in a range: the ranges that have one in this step.
    Raise PlanError as `bidirectional_ranges` says.
    """
    by_row = batch.states.extras.bidirectional_ranges
    if not by_row:
        return
    windows = [W for table in batch.states.block_tables if (W := table.group.sliding_window) is not None]
    for b in prefilling_with(by_row, batch):
        c, end = int(batch.num_computed_tokens[b]), int(batch.seq_lens[b])
        ranges = by_row[int(batch.idx_mapping[b])]
        start, stop = ranges.T
        here = ranges[(start < end) & (stop > c)]
        if not len(here):
            continue
        if here[-1, 1] > end:
            raise PlanError("the step ends inside a bidirectional range, whose tokens see each other: schedule all of "
                            "it, or end before it", step=batch.step, request=batch.req_ids[b], tensor="seq_lens",
                            index=b, expected=f"not in {here[-1, 0] + 1} … {here[-1, 1] - 1}", got=end)  # fmt: skip
        if windows and c - here[0, 0] >= min(windows):
            raise PlanError("the step begins inside a bidirectional range whose start is below the sliding window: "
                            "compute the range again from its start", step=batch.step, request=batch.req_ids[b],
                            tensor="num_computed_tokens", index=b,
                            expected=f"at most {here[0, 0] + min(windows) - 1}", got=c)  # fmt: skip
        yield b, here


def refuse_ranges(batch: BatchTensors, what: str) -> None:
    """Raise PlanError if a token of the step is in a range, for kernels that always apply a causal mask."""
    for b, ranges in ranges_of_requests(batch):
        raise PlanError(f"{what} has a causal mask without bidirectional ranges: use attention_mask or dense_inputs",
                        step=batch.step, request=batch.req_ids[b], tensor="bidirectional_ranges", index=b,
                        got=ranges.tolist())  # fmt: skip
