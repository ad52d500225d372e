"""The kernels of thinking budgets in vLLM's second model runner, as functions over its buffers: see
`foreword.vllm.inputs`. A marker is a run of tokens that begins or ends a thinking part.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I64, Ints
from foreword.vllm.inputs import Grid


def update_committed_marker_cache_kernel(
    grid: Grid,
    req_ids_ptr: Ints,
    thinking_token_budget_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    total_len_ptr: Ints,
    cached_last_start_ptr: Ints,
    cached_last_end_ptr: Ints,
    cached_scan_pos_ptr: Ints,
    reasoning_start_token_ids_ptr: Ints,
    natural_reasoning_end_token_ids_ptr: Ints,
    *,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Write, for each request with a budget, the positions of the last begin and of the last natural end among its
    tokens, and
    where the next scan begins.

    The first scan looks back in blocks of ``BLOCK`` tokens until one has a marker; what stands before it stays -1.
    """
    start, end = reasoning_start_token_ids_ptr[:START_LEN], natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN]
    for row in req_ids_ptr[: grid[0]]:
        if thinking_token_budget_ptr[row] < 0:
            continue
        length = int(total_len_ptr[row])
        tokens = all_token_ids_ptr[row, :length]
        starts, ends = _places(tokens, start), _places(tokens, end)
        first, last_start, last_end = cached_scan_pos_ptr[row], cached_last_start_ptr[row], cached_last_end_ptr[row]
        if first > length:
            first, last_start, last_end = 0, -1, -1
        if first == 0 and last_start < 0 and last_end < 0:
            for stop in range(length, 0, -BLOCK):
                first = max(stop - BLOCK, 0)
                last_start, last_end = _last(starts, first, stop, -1), _last(ends, first, stop, -1)
                if last_start >= 0 or last_end >= 0:
                    break
        else:
            last_start, last_end = _last(starts, first, length, last_start), _last(ends, first, length, last_end)
        cached_last_start_ptr[row], cached_last_end_ptr[row] = last_start, last_end
        cached_scan_pos_ptr[row] = max(length - (MAX_LEN - 1), 0)


def thinking_budget_kernel(
    grid: Grid,
    logits_ptr: F32,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    thinking_token_budget_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    total_len_ptr: Ints,
    input_ids_ptr: Ints,
    expanded_local_pos_ptr: Ints,
    cached_last_start_ptr: Ints,
    cached_last_end_ptr: Ints,
    reasoning_start_token_ids_ptr: Ints,
    natural_reasoning_end_token_ids_ptr: Ints,
    reasoning_end_token_ids_ptr: Ints,
    *,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    """Set logits[l, t] = 10⁹ for the next token t of the end, where a thinking part is open and has its budget of
    tokens.

    The drafts before logit l of its request count as its tokens. t is the one after the longest beginning of the end
    with which the tokens end.
    """
    start, natural_end = (
        reasoning_start_token_ids_ptr[:START_LEN],
        natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN],
    )
    end = reasoning_end_token_ids_ptr[:END_LEN].tolist()
    for token, row in enumerate(expanded_idx_mapping_ptr[: grid[0]]):
        if (budget := thinking_token_budget_ptr[row]) < 0:
            continue
        first, total = token - int(expanded_local_pos_ptr[token]), int(total_len_ptr[row])
        tokens = np.concatenate([all_token_ids_ptr[row, :total], input_ids_ptr[first + 1 : token + 1]])
        starts, ends = _places(tokens, start), _places(tokens, natural_end)
        last_start = _last(starts, total - START_LEN + 1, len(tokens), int(cached_last_start_ptr[row]))
        last_end = _last(ends, total - NATURAL_END_LEN + 1, len(tokens), int(cached_last_end_ptr[row]))
        if last_start < 0 or last_start <= last_end or len(tokens) - (last_start + START_LEN) < budget:
            continue
        longest = min(END_LEN - 1, len(tokens))
        begun = [n for n in range(1, longest + 1) if tokens[len(tokens) - n :].tolist() == end[:n]]
        logits_ptr[token, end[max(begun, default=0)]] = 1e9


def _places(tokens: Ints, marker: Ints) -> I64:
    """Return the positions at which a marker stands."""
    count = max(len(tokens) - len(marker) + 1, 0)
    found = np.ones(count, np.bool_)
    for j, part in enumerate(marker):
        found &= tokens[j : count + j] == part
    return np.flatnonzero(found)


def _last(places: I64, first: int, stop: int, otherwise: int) -> int:
    """Return the last of these positions in [first, stop)."""
    inside = places[(places >= first) & (places < stop)]
    return int(inside[-1]) if inside.size else otherwise
