"""Hit rules of the groups against brute force, and their fixed point."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.cache.groups import FullAttention, RecurrentState, SlidingWindow, longest_common_hit

presence = st.lists(st.booleans(), max_size=12)


def readable(window: int | None, position: int) -> range:
    """Positions that a query at ``position`` reads, itself excluded: the definition, not the arithmetic."""
    low = 0 if window is None else max(0, position - window + 1)
    return range(low, position)


def can_go_on(window: int | None, present: list[bool], blocks: int, size: int) -> bool:
    return all(present[p // size] for p in readable(window, blocks * size))


@given(presence, st.integers(1, 4))
def test_a_full_hit_needs_every_block(present: list[bool], size: int):
    got = FullAttention(size).longest_hit(present, len(present))
    assert got == max(n for n in range(len(present) + 1) if can_go_on(None, present, n, size))


@given(presence, st.integers(1, 4), st.integers(1, 17), st.integers(0, 12))
def test_a_window_hit_needs_what_the_next_token_reads(present: list[bool], size: int, window: int, limit: int):
    limit = min(limit, len(present))
    got = SlidingWindow(size, window).longest_hit(present, limit)
    assert got == max(n for n in range(limit + 1) if can_go_on(window, present, n, size))


@given(presence, st.integers(0, 12))
def test_a_recurrent_state_continues_at_the_last_snapshot_and_takes_one_block(present: list[bool], limit: int):
    limit = min(limit, len(present))
    group = RecurrentState(4)
    assert group.longest_hit(present, limit) == max(n for n in range(limit + 1) if n == 0 or present[n - 1])
    assert group.most_blocks(60, 7) == 1


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 60))
def test_the_first_needed_block_holds_the_lowest_position_read(size: int, window: int, computed: int):
    lowest = min([computed, *readable(window, computed)])
    assert SlidingWindow(size, window).first_needed(np.array([computed])).tolist() == [lowest // size]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 8), st.integers(1, 40))
def test_a_window_never_holds_more_blocks_than_its_bound(size: int, window: int, chunk: int, length: int):
    group, most = SlidingWindow(size, window), 0
    for computed in range(0, length, 1):
        first = int(group.first_needed(np.array([computed]))[0])
        most = max(most, -(-min(computed + chunk, length) // size) - first)
    assert most <= group.most_blocks(length, chunk)


@given(st.data(), st.integers(0, 40))
def test_the_common_hit_is_the_longest_every_group_accepts(data: st.DataObject, limit: int):
    groups = [FullAttention(2), SlidingWindow(2, 5), SlidingWindow(4, 3), RecurrentState(4)]
    present = [data.draw(st.lists(st.booleans(), min_size=20, max_size=20)) for _ in groups]
    windows = [None, 5, 3]

    def accepted(tokens: int) -> bool:
        return (tokens == 0 or present[3][tokens // 4 - 1]) and all(
            can_go_on(w, p, tokens // g.block_size, g.block_size)
            for g, w, p in zip(groups, windows, present, strict=False)
        )

    wanted = max(n for n in range(0, limit + 1, 4) if accepted(n))
    assert longest_common_hit(groups, present, limit, 4) == wanted
