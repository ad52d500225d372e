"""Random numbers as a pure function of (seed, position, token): no stream, no state, no batch.

Drawing from softmax(z) is taking the argmax of z + Gumbel noise. With the noise a hash of the request's seed, the
position that the token will take and the token's id, equal requests draw equal tokens in any company, any chunking,
after a preemption, and whether or not a draft was verified at that position.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import F64, Ints

PER_POSITION = 0x9E3779B97F4A7C15
PER_TOKEN = 0xBF58476D1CE4E5B9
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = 0xFFFFFFFFFFFFFFFF


def gumbel_noise(seed: int, position: int, token_ids: Ints) -> F64:
    """One Gumbel(0, 1) number a token, [n] float64. All integer arithmetic is modulo 2^64:

    x = seed + position · 0x9E3779B97F4A7C15 + token · 0xBF58476D1CE4E5B9
    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    u = ((x >> 40) + 0.5) · 2^−24                 gumbel = −log(−log u)
    """
    x = token_ids.astype(np.uint64) * np.uint64(PER_TOKEN)
    x += np.uint64((seed + position * PER_POSITION) & MASK)
    x ^= x >> np.uint64(30)
    x *= np.uint64(MIX[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(MIX[1])
    x ^= x >> np.uint64(31)
    u = ((x >> np.uint64(40)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(u))


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th completion of a prompt, an int64. Index 0 keeps the request's own seed."""
    if index == 0:
        return seed
    x = (seed + index * PER_POSITION) & MASK
    x = ((x ^ (x >> 30)) * MIX[0]) & MASK
    x = ((x ^ (x >> 27)) * MIX[1]) & MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
