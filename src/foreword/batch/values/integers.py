"""Integers from outside as int32: what plans, samples and requests are given in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32

INT32_MAX = 2**31 - 1


def as_int32(values: npt.ArrayLike) -> I32 | None:
    """The values as int32, of any shape; None where they are no integers, do not fit, or have no shape at all."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of lists of different lengths
        return None
    if array.dtype == np.int32:
        return array
    if array.size and (array.dtype.kind not in "iu" or array.min() < -INT32_MAX - 1 or array.max() > INT32_MAX):
        return None
    return array.astype(np.int32)


def is_int32(value: object, low: int = -INT32_MAX - 1) -> bool:
    """Whether it is one integer in [low, 2³¹ − 1]."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= INT32_MAX
