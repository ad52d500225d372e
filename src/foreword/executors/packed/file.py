"""A file of arrays by name, written once and mapped by every process that reads it.

    | "FWPACK01" | header bytes u64 | sha256 of the header | header | arrays, each from a multiple of 64 bytes on |
    | sha256 of all bytes before it |

All numbers are little-endian. The header is JSON: {"recipe": …, "parts": {name: [form, dtype, shape, offset]}}, where
``recipe`` names the inputs that the arrays were computed from, and ``form`` is a text that a reader compares with the
form that it expects.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.hashes import sha256, sha256_of_files

_PREFIX = struct.Struct("<8sQ32s")
_MAGIC = b"FWPACK01"
_ALIGNMENT = 64  # bytes: kernels need arrays that begin at multiples of it
_DIGEST_BYTES = 32
_PIECE = 1 << 24
_LARGEST_HEADER = 1 << 26
_DTYPES = ("|u1", "<f4")


class PackedFileError(Exception):
    """A file that is damaged, incomplete, or not of this format."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An array with its name and form. Two parts with equal name and form have equal content."""

    form: str
    array: AnyArray


def write_parts(out: IO[bytes], recipe: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Write a file. Raise OSError where the system cannot write it."""
    table: dict[str, tuple[str, str, list[int], int]] = {}
    offset = 0
    for name, part in parts.items():
        offset = _aligned(offset)
        table[name] = part.form, part.array.dtype.str, list(part.array.shape), offset
        offset += part.array.nbytes
    header = json.dumps({"recipe": recipe, "parts": table}).encode()
    digest, done = sha256_of_files(), 0

    def write(data: bytes | memoryview) -> None:
        nonlocal done
        for first in range(0, len(data), _PIECE):
            piece = data[first : first + _PIECE]
            digest.update(piece)
            out.write(piece)
        done += len(data)

    write(_PREFIX.pack(_MAGIC, len(header), sha256(header).digest()))
    write(header)
    start = _start(len(header))
    for (_, _, _, offset), part in zip(table.values(), parts.values(), strict=True):
        write(bytes(start + offset - done))
        write(np.ascontiguousarray(part.array).reshape(-1).view(np.uint8).data)
    out.write(digest.digest())


class PackedFile:
    """A file that `write_parts` wrote, mapped for reading. Its pages are shared by all processes that map it.

    Arrays read the bytes that the file has now; `check_bytes` compares them with its digest. Processes that have mapped
    the file can still read it after it is deleted or renamed.
    """

    def __init__(self, descriptor: int) -> None:
        """Map an open file, which may be closed afterwards. Raise PackedFileError unless its header is whole and its
        size is right, and OSError where the system cannot map it.
        """
        self.size = os.fstat(descriptor).st_size
        self.recipe, self._table, end = _read_header(descriptor, self.size)
        if self.size != end + _DIGEST_BYTES:
            raise PackedFileError(f"{self.size} bytes, {end + _DIGEST_BYTES} expected")
        self._map = mmap.mmap(descriptor, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def check_bytes(self) -> None:
        """Raise PackedFileError unless all bytes are those that were written."""
        digest, end = sha256_of_files(), self.size - _DIGEST_BYTES
        for first in range(0, end, _PIECE):
            digest.update(self._bytes[first : min(first + _PIECE, end)].data)
        if digest.digest() != self._bytes[end:].tobytes():
            raise PackedFileError("its bytes have another digest than those that were written")

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def array(self, name: str, form: str) -> AnyArray:
        """Return the array of a part, read-only. Raise PackedFileError if there is none of this name and form."""
        if name not in self._table:
            raise PackedFileError(f"no part {name!r}")
        part = self._table[name]
        if part.form != form:
            raise PackedFileError(f"part {name!r} is {part.form!r}, {form!r} expected")
        return self._bytes[part.offset : part.offset + part.nbytes].view(part.dtype).reshape(part.shape)


def read_recipe(descriptor: int) -> Mapping[str, Any]:
    """Return the recipe of an open file. Raise PackedFileError unless its header is whole."""
    return _read_header(descriptor, os.fstat(descriptor).st_size)[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an array in the file. It begins at byte ``offset``."""

    form: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read_header(descriptor: int, size: int) -> tuple[Mapping[str, Any], dict[str, _Place], int]:
    """Return the recipe and the parts of a file, and the offset of the end of its last array."""
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise PackedFileError(f"{len(prefix)} bytes are no prefix")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > min(size, _LARGEST_HEADER):
        raise PackedFileError("its prefix is not of this format")
    header = os.pread(descriptor, length, _PREFIX.size)
    if sha256(header).digest() != digest:
        raise PackedFileError("its header has another digest than the one that was written")
    try:
        values = json.loads(header)
        table = dict(_places(values["parts"], _start(length)))
        recipe = dict(values["recipe"])
    except (ValueError, KeyError, TypeError) as error:
        raise PackedFileError(f"its header cannot be read: {error}") from None
    return recipe, table, max((part.offset + part.nbytes for part in table.values()), default=_start(length))


def _places(parts: Mapping[str, Any], start: int) -> Iterator[tuple[str, _Place]]:
    for name, (form, dtype, shape, offset) in parts.items():
        if dtype not in _DTYPES or min(offset, *shape) < 0 or offset % _ALIGNMENT:
            raise ValueError(f"part {name!r:.80}")
        yield name, _Place(form, np.dtype(dtype), tuple(shape), start + offset)


def _start(header_bytes: int) -> int:
    """Return the offset at which arrays begin after a header."""
    return _aligned(_PREFIX.size + header_bytes)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
