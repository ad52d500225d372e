"""The noise: its definition in plain integers, and that it is Gumbel noise."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.sampling import derived_seed, gumbel_noise

M64 = (1 << 64) - 1


def plain(seed: int, position: int, token: int) -> float:
    x = (seed + position * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9) & M64
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M64
    x ^= x >> 31
    u = ((x >> 40) + 0.5) * 2.0**-24
    return -math.log(-math.log(u))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 300_000), min_size=1))
def test_noise_is_its_definition(seed: int, position: int, tokens: list[int]):
    got = gumbel_noise(seed, position, np.array(tokens, np.int64))
    np.testing.assert_allclose(got, [plain(seed, position, t) for t in tokens], rtol=1e-12)


def test_noise_has_the_moments_of_a_gumbel_distribution():
    noise = np.concatenate([gumbel_noise(7, p, np.arange(50_000)) for p in range(4)])
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_noise_at_neighbouring_positions_seeds_and_tokens_is_unrelated():
    tokens = np.arange(20_000)
    base = gumbel_noise(1, 5, tokens)
    for other in (gumbel_noise(1, 6, tokens), gumbel_noise(2, 5, tokens), gumbel_noise(1, 5, tokens + 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


def test_completions_of_one_prompt_get_different_seeds_and_the_first_keeps_its_own():
    seeds = [derived_seed(42, i) for i in range(1000)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 1000
    assert all(-(2**63) <= s < 2**63 for s in seeds)
