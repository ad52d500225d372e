"""Integers from callers as int32: plans, samples, token and block ids."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32
from foreword.errors import PlanError

T = TypeVar("T")
D = TypeVar("D")

INT32 = np.dtype(np.int32)
INT32_MAX = 2**31 - 1


def attempt(convert: Callable[[Any], T], value: Any, *, otherwise: D) -> T | D:
    """Return what a conversion makes of a caller's value; ``otherwise`` if the value's own methods raise anything."""
    try:
        return convert(value)
    except MemoryError:
        raise
    except Exception:
        return otherwise


def as_int32(values: npt.ArrayLike) -> I32 | None:
    """Return the values as int32, of any shape; None where they are not integers, do not fit, or are ragged lists.

    An integer in a list is anything with ``__index__``, such as a 0-d tensor. A tensor that NumPy cannot read, as one
    on a device, raises its own TypeError.
    """
    if type(values) is np.ndarray and values.dtype is INT32:
        return values
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of lists of different lengths
        return None
    except TypeError:
        if not isinstance(values, list | tuple):
            raise
        return _indices(values)
    if array.dtype == np.int32:
        return array
    if array.size and array.dtype.kind not in "iu":
        if array.dtype == object:
            found = _indices(array.flat)
            return None if found is None else found.reshape(array.shape)
        return _indices(values) if isinstance(values, list | tuple) else None
    if array.size and (array.min() < -INT32_MAX - 1 or array.max() > INT32_MAX):
        return None
    return array.astype(np.int32)


def flat_int32(values: object) -> I32 | None:
    """Return a caller's flat, non-empty list of integers as int32; None for anything else, whatever its items raise."""
    if length_of(values) <= 0 or isinstance(values, Mapping | bytes | bytearray | memoryview):
        return None
    found: I32 | None = attempt(as_int32, values, otherwise=None)
    return found if found is not None and found.ndim == 1 else None


def as_integer(value: Any) -> int | None:
    """Return ``value.__index__()``; None if it has no such method, and for a bool."""
    return None if isinstance(value, bool) else attempt(operator.index, value, otherwise=None)


def length_of(values: object) -> int:
    """Return len(values), −1 for what has none."""
    return attempt(len, values, otherwise=-1)


def _indices(values: Iterable[object]) -> I32 | None:
    found = [as_integer(value) for value in values]
    if any(value is None or not -INT32_MAX - 1 <= value <= INT32_MAX for value in found):
        return None
    return np.array(found, np.int32)


def is_int32(value: object, low: int = -INT32_MAX - 1) -> bool:
    """Return whether it is one integer in [low, 2³¹ − 1]."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= INT32_MAX


def int32s(values: npt.ArrayLike, tensor: str) -> I32:
    """Return integers as contiguous int32. Raise PlanError for what is not an integer or does not fit."""
    array = as_int32(values)
    if array is None:
        got = getattr(values, "dtype", None) or reprlib.repr(values)
        raise PlanError("must be integers that fit int32", tensor=tensor, expected="int32", got=str(got))
    return np.ascontiguousarray(array)
