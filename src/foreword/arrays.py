"""Array types by dtype, and arrays from a caller's values. Shapes are in docstrings, as in docs/tensors.md."""

from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
AnyArray = npt.NDArray[Any]

MOST_OF_RANGE = 1 << 24  # numbers of a range that becomes an array


def as_array(values: Any) -> AnyArray | None:
    """Return the values as an array, which may be the caller's. Return None for what NumPy cannot read, and for a
    range, or rows with a range, of more than MOST_OF_RANGE numbers: it may have more than memory holds.
    """
    try:
        rows = values if isinstance(values, list | tuple) else (values,)
        if range in set(map(type, rows)) and any(type(row) is range and len(row) > MOST_OF_RANGE for row in rows):
            return None
        return np.asarray(values)
    except MemoryError:
        raise
    except Exception:  # whatever the caller's object raises
        return None
