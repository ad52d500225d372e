"""Random numbers as a pure function of (seed, position, token), without a stream or any state.

Drawing from softmax(z) is taking the argmax of z + Gumbel noise. The noise is a hash of the request's seed, the
position that the token will take and the token's id. So equal requests draw equal tokens whatever else is in the batch,
however the prompt is chunked, after a preemption, and whether or not a draft was verified at that position.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import F64, I64, U64, Ints
from foreword.seeds import MASK, STRIDE, mix64

PER_TOKEN = 0xBF58476D1CE4E5B9


def uniform_noise(seed: int, position: int, token_ids: Ints) -> F64:
    """Return one number of (0, 1) per token, float64 [n]. Integer arithmetic is modulo 2^64:

    x = mix64(seed + position · 0x9E3779B97F4A7C15 + token · 0xBF58476D1CE4E5B9)        u = ((x >> 40) + 0.5) · 2^−24
    """
    x = token_ids.astype(np.uint64) * np.uint64(PER_TOKEN)
    x += np.uint64((seed + position * STRIDE) & MASK)
    return _uniform(x)


def gumbel_noise(seed: int, position: int, token_ids: Ints) -> F64:
    """Return one Gumbel(0, 1) number per token, float64 [n]: −log(−log u) of `uniform_noise`."""
    return _gumbel(uniform_noise(seed, position, token_ids))


def gumbel_of_each(seeds: I64, positions: I64, token_ids: Ints) -> F64:
    """Return `gumbel_noise` of each seed, position and token, float64 [n]."""
    x = token_ids.astype(np.uint64) * np.uint64(PER_TOKEN)
    x += seeds.view(np.uint64) + positions.view(np.uint64) * np.uint64(STRIDE)
    return _gumbel(_uniform(x))


def seeds_from(seeds: I64, first_token: int) -> I64:
    """Return the seeds with which tokens 0, 1, … have the noise of ``first_token`` and the next ones with ``seeds``."""
    return (seeds.view(np.uint64) + np.uint64(first_token * PER_TOKEN & MASK)).view(np.int64)


def _uniform(x: U64) -> F64:
    u: F64 = ((mix64(x) >> 40).astype(np.float64) + 0.5) * 2.0**-24
    return u


def _gumbel(u: F64) -> F64:
    return -np.log(-np.log(u))
