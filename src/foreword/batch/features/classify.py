"""Separate decodes from prefills, for kernels with a path for each, and for graphs of one query length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreword.arrays import Bools, Ints
from foreword.batch.step.tensors import BatchTensors


class Split(NamedTuple):
    """The number of leading requests that are decodes, and the number of their tokens. All other requests are
    prefills.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def is_decode(batch: BatchTensors) -> Bools:
    """Return bool [B]: whether a request computes one known token after a context, and its drafts if it has any (n − k
    = 1 and c > 0).

    The last token of a prompt after a context counts as a decode, also with placeholder drafts. A chunk of K + 1 prompt
    tokens does not, although it is as long as a verification. A prompt of one token does not, because it has no
    context.
    """
    decodes: Bools = (batch.num_scheduled_tokens - batch.num_draft_tokens == 1) & (batch.num_computed_tokens > 0)
    return decodes


def uniform_decode_len(batch: BatchTensors) -> int | None:
    """Return the query length of a batch of decodes with equal query lengths, for a captured graph; None for any other
    batch.
    """
    n = batch.num_scheduled_tokens
    if not len(n) or int(n[0]) != batch.max_query_len or (n != n[0]).any() or not is_decode(batch).all():
        return None
    return int(n[0])


def split_decodes_and_prefills(
    batch: BatchTensors,
    decode_threshold: int = 1,
    *,
    require_uniform: bool = False,
    short_extends_are_decodes: bool = True,
) -> Split:
    """Return the end of the leading short queries, for a batch that is sorted with order="decode_first".

    A request counts as a decode while it has at most decode_threshold tokens, and
        require_uniform: as many as the first request;
        not short_extends_are_decodes: no prompt token left to compute, or is_decode.
    A kernel's decode path computes any short query over context correctly, so a short extend may take it.
    """
    n = batch.num_scheduled_tokens
    decodes = n <= decode_threshold
    if require_uniform and len(n):
        decodes = decodes & (n == n[0])
    if not short_extends_are_decodes:
        decodes = decodes & (~batch.is_prefilling | is_decode(batch))
    count = len(n) if decodes.all() else int(np.argmin(decodes))
    tokens = int(batch.query_start_loc[count])
    return Split(count, len(n) - count, tokens, batch.num_tokens - tokens)


def region_swaps(regions: Ints) -> list[tuple[int, int]]:
    """Return the smallest number of swaps of two places that sort the regions in ascending order.

    For dense-row backends: regions[i] is 0 for a decode, 1 for a short extend, 2 for a long one, 3 for a prompt that
    starts; the swaps are `RequestStates.swap_rows` calls, in this order. Requests that are already in their region do
    not move. The order within a region is arbitrary.
    """
    have = np.array(regions)
    want = np.sort(have)
    swaps: list[tuple[int, int]] = []
    waiting: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(have != want).tolist():
        waiting.setdefault((int(have[i]), int(want[i])), []).append(i)
    for (a, b), places in waiting.items():  # each is in the region of the other, so one swap corrects both
        others = waiting.get((b, a), [])
        while a < b and places and others:
            i, j = places.pop(0), others.pop(0)
            swaps.append((i, j))
            have[[i, j]] = have[[j, i]]
    for i in range(len(have)):  # longer cycles
        if have[i] != want[i]:
            j = next(j for j in range(i + 1, len(have)) if have[j] == want[i] and want[j] != want[i])
            swaps.append((i, j))
            have[[i, j]] = have[[j, i]]
    return swaps
