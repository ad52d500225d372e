"""Allocate arrays of which a run uses only a part."""

from __future__ import annotations

import mmap
import sys
from math import prod

import numpy as np

from foreword.arrays import U8, AnyArray
from foreword.errors import ConfigError

MOST_OF_HUGE_PAGES = 1 << 28  # bytes: larger arrays use small memory pages
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def zeros(shape: tuple[int, ...], dtype: str, sizes: str, few_rows: bool = False) -> AnyArray:
    """Return zeros that only take memory where they are written. sizes: the parameters that determine the shape, for
    the message.

    NumPy asks for huge pages, with which a single token in a row takes 2 MiB. Huge pages make a step faster. So only
    arrays of more than MOST_OF_HUGE_PAGES bytes, and arrays of which a run writes few rows, use small pages.
    Raise ConfigError for an array that does not fit into the machine's memory.
    """
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    try:
        if num_bytes <= (0 if few_rows else MOST_OF_HUGE_PAGES) or sys.platform != "linux":
            return np.zeros(shape, dtype)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        array: AnyArray = np.frombuffer(memory, dtype).reshape(shape)
        return array
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{sizes}: {_text_of(num_bytes)} of memory cannot be had; use smaller sizes") from error


def zero_bytes(num_bytes: int, sizes: str) -> U8:
    """Return `zeros` of bytes."""
    block: U8 = zeros((num_bytes,), "uint8", sizes)
    return block


def _text_of(num_bytes: int) -> str:
    unit = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{num_bytes / (1 << 10 * unit):.3g} {_UNITS[unit]}"
