"""Buckets of padded sizes: which graph a step runs in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.batch.values.padding import PaddingBuckets
from foreword.errors import ConfigError, PlanError

BUCKETS = st.builds(
    lambda sizes, reqs: PaddingBuckets(sizes, max_num_reqs=reqs),
    st.lists(st.integers(1, 70), min_size=1, max_size=8),
    st.none() | st.integers(1, 40),
)


def test_the_usual_sizes_are_powers_of_two_then_multiples_of_the_step_then_the_largest():
    assert PaddingBuckets.up_to(40).sizes == (1, 2, 4, 8, 16, 24, 32, 40)
    assert PaddingBuckets.up_to(37).sizes == (1, 2, 4, 8, 16, 24, 32, 37)
    assert PaddingBuckets.up_to(3).sizes == (1, 2, 3)
    assert PaddingBuckets.up_to(1).sizes == (1,)
    assert PaddingBuckets.up_to(5, step=1).sizes == (1, 2, 3, 4, 5)
    assert PaddingBuckets.up_to(20, step=6).sizes == (1, 2, 4, 6, 12, 18, 20)


def test_a_step_takes_the_smallest_bucket_that_holds_its_tokens():
    buckets = PaddingBuckets([16, 4, 8, 8], max_num_reqs=6)
    assert buckets.sizes == (4, 8, 16)
    for num_tokens, graph in {1: (4, 4), 4: (4, 4), 5: (8, 6), 8: (8, 6), 9: (16, 6), 16: (16, 6)}.items():
        assert buckets.pad_for(num_tokens, 1) == graph
    assert buckets.pad_for(17, 1) is None
    assert buckets.pad_for(8, 7) is None
    assert buckets.pad_for(0, 0) == (4, 4)


def test_uniform_decodes_take_a_bucket_of_whole_requests():
    buckets = PaddingBuckets([1, 2, 4, 8, 16], max_num_reqs=6)
    assert buckets.graphs(1) == [(1, 1), (2, 2), (4, 4), (6, 6)]
    assert buckets.graphs(3) == [(3, 1), (6, 2), (9, 3)]  # 16 tokens round up to 18, past the largest
    assert buckets.pad_for(3, 1, 3) == (3, 1)
    assert buckets.pad_for(9, 3, 3) == (9, 3)
    assert buckets.pad_for(12, 4, 3) is None
    assert buckets.pad_for(5, 5, 1) == (6, 6)
    assert buckets.pad_for(7, 7, 1) is None


@given(BUCKETS, st.integers(0, 75), st.integers(0, 75))
def test_any_step_fits_its_graph_and_the_graph_is_the_smallest(buckets, num_tokens, num_reqs):
    num_reqs = min(num_reqs, num_tokens)
    holding = [g for g in buckets.graphs() if g[0] >= num_tokens and g[1] >= num_reqs]
    assert buckets.pad_for(num_tokens, num_reqs) == min(holding, default=None)


@given(BUCKETS, st.integers(0, 75), st.integers(1, 9))
def test_uniform_decodes_fit_their_graph_and_it_is_the_smallest(buckets, num_reqs, query_len):
    graphs = buckets.graphs(query_len)
    assert all(tokens == reqs * query_len and tokens <= buckets.sizes[-1] for tokens, reqs in graphs)
    holding = [g for g in graphs if g[1] >= num_reqs]
    assert buckets.pad_for(num_reqs * query_len, num_reqs, query_len) == min(holding, default=None)


@given(BUCKETS, st.none() | st.integers(1, 5))
def test_a_graph_is_padded_to_itself_and_more_never_needs_less(buckets, query_len):
    for tokens, reqs in buckets.graphs(query_len):
        assert buckets.pad_for(tokens, reqs, query_len) == (tokens, reqs)
    step = query_len or 1
    padded = [buckets.pad_for(n * step, n, query_len) for n in range(80)]
    fitting = [p for p in padded if p is not None]
    assert fitting == sorted(fitting)
    assert padded[len(fitting) :] == [None] * (len(padded) - len(fitting))


@pytest.mark.parametrize("sizes", [[], [0], [4, -1], [2.5], [True]])
def test_sizes_that_are_not_token_counts_are_refused(sizes):
    with pytest.raises(ConfigError):
        PaddingBuckets(sizes)


def test_limits_and_counts_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="max_num_reqs"):
        PaddingBuckets([1], max_num_reqs=0)
    with pytest.raises(ConfigError, match="step"):
        PaddingBuckets.up_to(8, step=0)
    buckets = PaddingBuckets.up_to(8)
    for counts in [(1, 2), (3, -1), (5, 2, 2), (0, 0, 0), (-2, -1, 2)]:
        with pytest.raises(PlanError):
            buckets.pad_for(*counts)
