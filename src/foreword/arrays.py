"""The array types of annotations, by dtype. Shapes are in docstrings, with the symbols of docs/tensors.md."""

from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
AnyArray = npt.NDArray[Any]
