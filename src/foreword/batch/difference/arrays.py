"""The arrays of a difference, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreword.arrays import I32, I64, AnyArray
from foreword.batch.difference.encoding import malformed
from foreword.integers import INT32_MAX


class Arrays:
    """The arrays of a difference, checked as they are read."""

    def __init__(self, arrays: Mapping[str, AnyArray]) -> None:
        self.unread = dict(arrays)

    def read(self, name: str, low: int = 0, high: int = INT32_MAX, count: int | None = None) -> I64:
        """Return a flat array of integers in [low, high]. count: how many; None: any number.

        Zeros where it is absent.
        """
        array = self.unread.pop(name, None)
        if array is None:
            return np.zeros(count or 0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub" or (count is not None and len(array) != count):
            size = "N" if count is None else count
            raise malformed(name, expected=f"integers [{size}]", got=f"{array.dtype} {array.shape}")
        values = array.astype(np.int64)
        check_range(name, values, low, high)
        return values

    def pairs(self, name: str) -> I32:
        """Return an array of 2 · N integers of 0 or more, as [N, 2]."""
        values = self.int32(name)
        if len(values) % 2:
            raise malformed(name, expected="pairs", got=len(values))
        return values.reshape(-1, 2)

    def int32(self, name: str, low: int = 0, high: int = INT32_MAX, count: int | None = None) -> I32:
        return self.read(name, low, high, count).astype(np.int32)

    def check_all_read(self) -> None:
        for name in self.unread:
            raise malformed(name, expected="an array of this format")


def check_range(name: str, values: I64, low: int, high: int) -> None:
    """Raise the error of a malformed difference unless low ≤ values ≤ high."""
    if len(values) and not (low <= values.min() and values.max() <= high):
        raise malformed(name, expected=f"{low} … {high}", got=(int(values.min()), int(values.max())))
