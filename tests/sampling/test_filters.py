"""min-p, top-k and top-p against the definition on sorted probabilities."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sampling_rig import nucleus

from foreword.sampling import kept_tokens

# Few distinct values, so that ties are the rule.
rows = st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40).filter(
    lambda z: max(z) > -np.inf
)


def plain(z: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    p = np.exp(np.array(z) - max(z))
    order = sorted(range(len(z)), key=lambda t: (-p[t], t))
    order = [t for t in order if p[t] > 0 and p[t] >= min_p * p.max() * (1 - 1e-12)]
    if top_k:
        order = order[:top_k]
    return sorted(nucleus(order, p, top_p))


@given(rows, st.integers(0, 45), st.sampled_from([0.05, 0.31, 0.77, 0.99, 1.0]), st.sampled_from([0.0, 0.11, 0.6, 1.0]))
def test_kept_tokens_are_those_of_the_definition(z: list[float], top_k: int, top_p: float, min_p: float):
    top_k = min(top_k, len(z))
    got = kept_tokens(np.array(z), top_k=top_k, top_p=top_p, min_p=min_p)
    assert got.tolist() == plain(z, top_k, top_p, min_p)


def test_a_wide_nucleus_is_found_beyond_the_first_guess():
    z = np.random.default_rng(0).normal(size=20_000) * 0.3
    got = kept_tokens(z, top_k=0, top_p=0.9, min_p=0.0)
    order = np.argsort(-z, kind="stable")
    reached = np.cumsum(np.exp(z[order]))
    assert got.tolist() == sorted(order[: int(np.searchsorted(reached, 0.9 * reached[-1])) + 1].tolist())


def test_a_flat_nucleus_keeps_the_lowest_ids():
    assert kept_tokens(np.zeros(5000), top_k=0, top_p=0.01, min_p=0.0).tolist() == list(range(50))


def test_at_least_one_token_stays():
    assert kept_tokens(np.array([0.0, 5.0, 1.0]), top_k=0, top_p=1e-9, min_p=1.0).tolist() == [1]
