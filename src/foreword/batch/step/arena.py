"""One block of memory for many arrays, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from foreword.arrays import U8, AnyArray
from foreword.batch.state.memory import zero_bytes
from foreword.errors import ConfigError

Allocator = Callable[[int], U8]
ALIGNMENT = 64  # bytes: a cache line


def carve(
    shapes: Sequence[tuple[tuple[int, ...], str]], allocator: Allocator | None, parameters: str
) -> tuple[U8, list[AnyArray]]:
    """Return arrays of these shapes and dtypes, filled with zeros, one after the other in one block of bytes, each at a
    multiple of 64.

    allocator(num_bytes) returns writable contiguous uint8 memory with any content, pinned memory for example. Returns
    the block and the arrays, which are views of it. parameters: those that determine the shapes. Raise ConfigError for
    memory of another size or kind, and for more than the machine has.
    """
    sizes = [prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes]
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    if allocator is None:
        block = zero_bytes(starts[-1] + ALIGNMENT, parameters)
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
