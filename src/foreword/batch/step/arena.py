"""One block of memory for many arrays, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from foreword.arrays import U8, AnyArray
from foreword.errors import ConfigError

Allocator = Callable[[int], U8]
ALIGNMENT = 64  # bytes: a cache line


def carve(
    shapes: Sequence[tuple[tuple[int, ...], str]], allocator: Allocator | None = None
) -> tuple[U8, list[AnyArray]]:
    """Arrays of these shapes and dtypes, zeros, one after the other in one block of bytes, each at a multiple of 64.

    allocator(num_bytes) returns writable contiguous uint8 memory with any content, pinned memory for example. Returns
    the block and the arrays, which are views of it. ConfigError for memory of another size or kind.
    """
    sizes = [prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    if allocator is None:
        block = np.zeros(starts[-1] + ALIGNMENT, np.uint8)
        first = -block.ctypes.data % ALIGNMENT
        block = block[first : first + starts[-1]]
    else:
        block = np.asarray(allocator(starts[-1]))
        flags = block.flags
        if block.dtype != np.uint8 or block.shape != (starts[-1],) or not (flags.writeable and flags.c_contiguous):
            raise ConfigError(
                f"allocator({starts[-1]}) returned {block.dtype} {block.shape}: must be writable contiguous uint8 "
                f"[{starts[-1]}]"
            )
        if block.ctypes.data % 8:
            raise ConfigError(f"allocator({starts[-1]}) returned memory that is not aligned to 8 bytes")
        block[:] = 0
    arrays = [
        block[start : start + size].view(dtype).reshape(shape)
        for start, size, (shape, dtype) in zip(starts[:-1], sizes, shapes, strict=True)
    ]
    return block, arrays
