"""The bytes of a `StepDifference`: a JSON header, then raw little-endian arrays. docs/difference.md has the format."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.errors import PlanError

MAGIC, VERSION = b"FWSD", 2
_PREFIX = struct.Struct("<4sIII")  # magic, version, header bytes, CRC-32 of all bytes after the prefix
_DTYPES = {name: np.dtype(f"<{name}") for name in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")}
_MAX_EQUAL = 2**16  # entries of an array that is stored as one


def malformed(what: str, *, expected: object = None, got: object = None) -> PlanError:
    """Return the error for bytes, or a difference, that do not follow the format. ``what`` names the part."""
    return PlanError("malformed step difference", tensor=what, expected=expected, got=got)


def pack(header: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> bytes:
    """Return the bytes of a JSON header and of arrays: integers in the smallest dtype that holds them, equal ones as
    one.
    """
    table, stored = [], []
    for name, array in arrays.items():
        dtype, is_equal = array.dtype.newbyteorder("<"), False
        if dtype.kind in "biu" and array.size:
            low, high = int(array.min()), int(array.max())
            dtype = np.min_scalar_type(high if low >= 0 else min(low, -high - 1)).newbyteorder("<")
            is_equal = low == high and 1 < array.size <= _MAX_EQUAL
        kind = dtype.str.lstrip("<|")
        if kind not in _DTYPES:
            raise malformed(name, expected="booleans, integers, or floats of 2, 4 or 8 bytes", got=array.dtype)
        table.append([name, "=" * is_equal + kind, *array.shape])
        stored.append((array.ravel()[:1] if is_equal else array).astype(dtype).tobytes())
    text = json.dumps({**header, "arrays": table}, separators=(",", ":"), default=plain).encode()
    body = b"".join([text, *stored])
    return _PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(body)) + body


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """Return the header and the arrays, which are read-only views of the bytes. Raise PlanError where they do not
    follow the format.
    """
    if len(data) < _PREFIX.size:
        raise malformed("length", expected=f"{_PREFIX.size} bytes or more", got=len(data))
    magic, version, size, checksum = _PREFIX.unpack_from(data)
    body = memoryview(data)[_PREFIX.size :]
    found = ("magic", MAGIC, magic), ("version", VERSION, version), ("checksum", checksum, zlib.crc32(body))
    for name, expected, got in found:
        if got != expected:
            raise malformed(name, expected=expected, got=got)
    try:
        header = json.loads(bytes(body[:size]))
        table = header.pop("arrays")
        described = [(name, kind, shape) for name, kind, *shape in table]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise malformed("header", expected='a JSON object with "arrays"', got=type(error).__name__) from None
    arrays: dict[str, AnyArray] = {}
    for name, kind, shape in described:
        dtype = _DTYPES.get(kind.removeprefix("=")) if isinstance(kind, str) else None
        ok = dtype is not None and isinstance(name, str) and name not in arrays and 0 < len(shape) < 5
        if dtype is None or not ok or any(type(n) is not int or not 0 <= n < 2**40 for n in shape):
            raise malformed(f"arrays: {name}", expected="[name, dtype, sizes …], each name once", got=(kind, shape))
        count = math.prod(shape)
        is_equal = kind[0] == "=" and 0 < count <= _MAX_EQUAL
        held = 1 if is_equal else count
        if held * dtype.itemsize > len(body) - size:
            raise malformed(f"arrays: {name}", expected=f"at most {len(body) - size} bytes", got=(kind, shape))
        array = np.frombuffer(body, dtype, held, size) if held else np.zeros(0, dtype)
        arrays[name] = np.broadcast_to(array, shape) if is_equal else array.reshape(shape)
        size += held * dtype.itemsize
    if size != len(body):
        raise malformed("length", expected=_PREFIX.size + size, got=len(data))
    return header, arrays


def plain(value: Any) -> Any:
    """Return NumPy scalars and arrays, and mappings, as JSON values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
