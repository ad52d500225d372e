"""The fields of blocks of quantised weights: uint8 [n, block_bytes], or a part of each block."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, U8


def f16(blocks: U8, at: int) -> F32:
    """Return the float16 at byte ``at`` of every block, −2 for its end, as float32 [n, 1]."""
    return blocks[:, at : at + 2 or None].view("<f2").astype(np.float32)


def halves(nibbles: U8) -> U8:
    """Split [n, g, w] into [n, 2 g, w]: of each group first the low nibbles, then the high ones."""
    n, g, w = nibbles.shape
    out = np.empty((n, g, 2, w), np.uint8)
    np.bitwise_and(nibbles, 15, out=out[:, :, 0])
    np.right_shift(nibbles, 4, out=out[:, :, 1])
    return out.reshape(n, 2 * g, w)


def bits(data: U8, width: int) -> U8:
    """Split [n, g, w] into [n, g · 8/width, w]: of each group the bit fields of ``width`` bits, lowest first."""
    n, _, w = data.shape
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (data[:, :, None, :] >> shifts & np.uint8((1 << width) - 1)).reshape(n, -1, w)
