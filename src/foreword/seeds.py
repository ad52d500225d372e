"""Seeds derived from a seed and a number, and the 64-bit mix behind them and behind the sampler's noise."""

from __future__ import annotations

from typing import Any

MASK = 0xFFFFFFFFFFFFFFFF
STRIDE = 0x9E3779B97F4A7C15


def mix64(x: Any) -> Any:
    """Return the finalizer of SplitMix64, a bijection of [0, 2^64): of an int, or elementwise of a uint64 array. Modulo
    2^64:

    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def derived_seed(seed: int, index: int) -> int:
    """Return the index-th seed derived from ``seed``, an int64: mix64(seed + index · 0x9E3779B97F4A7C15); ``seed`` for
    0.
    """
    if index == 0:
        return seed
    x: int = mix64((seed + index * STRIDE) & MASK)
    return x - (1 << 64) if x >> 63 else x
