"""Slopes of ALiBi: attention with biases that are linear in the distance of a key."""

from __future__ import annotations


def alibi_slopes(num_heads: int, most: float) -> tuple[float, ...]:
    """Return by how much the scores of each head fall for each position of that distance.

    With n the largest power of 2 up to num_heads: 2^(−most (h + 1) / n) for the heads h < n, and for the others, with
    j = h − n, 2^(−most (2 j + 1) / (2 n)).
    """
    n = 1 << (num_heads.bit_length() - 1)
    exponents = [(h + 1) / n if h < n else (2 * (h - n) + 1) / (2 * n) for h in range(num_heads)]
    return tuple(2.0 ** (-most * exponent) for exponent in exponents)
