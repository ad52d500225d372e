"""The GGUF file format, versions 2 and 3: metadata and tensors of one file, checked.

A file is, little-endian and without gaps up to the tensor data:

    | "GGUF" | version u32 | num_tensors u64 | num_metadata u64 |
    | num_metadata × ( key string | type u32 | value ) |
    | num_tensors × ( name string | num_dims u32 | num_dims × u64, fastest first | number format u32 | offset u64 ) |
    | zeros up to a multiple of general.alignment (32) | tensor data, each tensor at its offset from here |

A string is ``length u64 | UTF-8 bytes``; an array is ``type u32 | count u64 | values``. Any deviation
raises `ModelError` with the file, the byte offset, the field and the fix; no read goes past the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from foreword.errors import ModelError
from foreword.models.files import FETCH_AGAIN, FileRows, ModelFile, T, check_overlap, typed_value
from foreword.models.quants import Quant
from foreword.models.weights import Tensor


class Strings(Collection[str]):
    """The strings of an array in one piece of memory. Each is an object of Python only while it is read: those of a
    vocabulary would leave gaps in Python's memory, between objects that stay, when they are freed.
    """

    __slots__ = ("_count", "_joined")

    def __init__(self, texts: Sequence[bytes]) -> None:
        """Raise UnicodeDecodeError for a text that is not UTF-8."""
        b"\0".join(texts).decode()
        self._count, self._joined = len(texts), _BETWEEN.join(texts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return map(bytes.decode, self._joined.split(_BETWEEN) if self._count else ())

    def __contains__(self, text: object) -> bool:
        return any(text == own for own in self)

    def __repr__(self) -> str:
        return repr(self.tolist())

    def tolist(self) -> list[str]:
        """Return the strings as NumPy's arrays return their numbers."""
        return list(self)


Scalar = int | float | bool | str
Value = Scalar | Strings | npt.NDArray[np.generic]

FIRST_READ = 1 << 22
"""Bytes of a file that are read before its sizes are known. Most headers are smaller."""

_STRING, _ARRAY, _BOOL = 8, 9, 7
_BETWEEN = b"\xff"  # is in no UTF-8
_DTYPES: dict[int, np.dtype[np.generic]] = {
    number: np.dtype(name)
    for number, name in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "", "", "<u8", "<i8", "<f8"))
    if name
}
_QUANTS = {quant.ggml_type: quant for quant in Quant}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUF:
    """A parsed file, or all files of a split model. They stay open while ``files`` or one of ``tensors`` exists."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    files: tuple[ModelFile, ...] = ()

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the metadata value of a key. Raise ModelError if it is absent without a default, or not of type
        ``kind``.
        """
        try:
            return typed_value(self.metadata, key, kind, default)
        except TypeError as error:
            raise ModelError(f"{self.path}: metadata {error}. {FETCH_AGAIN}, or convert the model again") from None


def read_gguf(path: str | Path) -> GGUF:
    """Parse everything except tensor data. Raise ModelError unless it is a valid GGUF file."""
    at = _Cursor(ModelFile(Path(path), at_least=24))
    at.field = "magic"
    if (magic := at.take(4)) != b"GGUF":
        reason = f"expected b'GGUF', found {magic!r}"
        at.fail(reason, "It is not a GGUF file; give one, or a directory of safetensors", at=0)
    at.field = "version"
    version = at.u32()
    if version not in (2, 3):
        big = version & 0xFFFF == 0
        at.fail(f"{version} is not 2 or 3" + " (a big-endian file?)" * big, "Convert the model with a current tool")
    at.field = "num_tensors"
    num_tensors = at.count(24)
    at.field = "num_metadata"
    num_metadata = at.count(13)
    metadata: dict[str, Value] = {}
    for i in range(num_metadata):
        at.field = f"metadata {i} of {num_metadata}"
        at.field = key = at.string()
        if key in metadata:
            at.fail("the key occurs twice")
        metadata[key] = at.value()
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & alignment - 1:
        at.field = "general.alignment"
        at.fail(f"{alignment!r} is not a power of two")
    described = {}
    for name, quant, shape, offset in _tensor_infos(at, num_tensors, alignment):
        if name in described:
            at.fail("the tensor occurs twice")
        described[name] = quant, shape, offset
    start = -(-at.offset // alignment) * alignment
    tensors = {name: at.tensor(name, start, *info) for name, info in described.items()}
    offsets = {name: offset for name, (_, _, offset) in described.items()}
    check_overlap(at.path, ((offsets[name], offsets[name] + t.stored.nbytes, name) for name, t in tensors.items()))
    return GGUF(at.path, version, metadata, tensors, (at.file,))


def _tensor_infos(at: _Cursor, num_tensors: int, alignment: int) -> Iterator[tuple[str, Quant, tuple[int, ...], int]]:
    for i in range(num_tensors):
        at.field = f"tensor {i} of {num_tensors}"
        name = at.string()
        at.field = f"tensor {name}"
        num_dims = at.u32()
        if not 1 <= num_dims <= 4:
            at.fail(f"{num_dims} dimensions, expected 1 to 4")
        shape = tuple(reversed([at.u64() for _ in range(num_dims)]))
        quant = _QUANTS.get(number := at.u32())
        if quant is None:
            known = ", ".join(q.name for q in Quant)
            at.fail(f"number format {number} is not supported", f"Use a file in one of {known}")
        if 0 in shape or shape[-1] % quant.block_size:
            at.fail(f"shape {shape} is not made of whole {quant.name} blocks of {quant.block_size}")
        offset = at.u64()
        if offset % alignment:
            at.fail(f"offset {offset} is not a multiple of the alignment, {alignment}")
        yield name, quant, shape, offset


class _Cursor:
    """A position in the file, and the name of the field that is read there. ``data``: the beginning of the file."""

    def __init__(self, file: ModelFile) -> None:
        self.file, self.path, self.size = file, file.path, file.size
        self.data, self.offset, self.field = b"", 0, ""
        self._read_to(FIRST_READ)

    def _read_to(self, end: int) -> None:
        """Extend ``data`` to ``end`` or further, at least to twice its size; at most to the end of the file."""
        have = len(self.data)
        self.data += self.file.read(have, min(max(end, 2 * have), self.size) - have).tobytes()

    def fail(self, what: str, fix: str = FETCH_AGAIN, at: int | None = None) -> NoReturn:
        where = self.offset if at is None else at
        raise ModelError(f"{self.path}: at byte {where}, {self.field}: {what}. {fix}")

    def take(self, count: int) -> bytes:
        start, self.offset = self.offset, self.offset + count
        if self.offset > self.size:
            self.fail(f"{count} bytes needed, {self.size - start} left in the file", at=start)
        if self.offset > len(self.data):
            self._read_to(self.offset)
        return self.data[start : self.offset]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def count(self, min_bytes: int) -> int:
        """Read a count of entries of at least ``min_bytes`` each. Fail if they cannot fit into the rest of the file."""
        count = self.u64()
        if count * min_bytes > self.size - self.offset:
            self.fail(f"{count} cannot fit into the remaining {self.size - self.offset} bytes")
        return count

    def value(self) -> Value:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            number: Scalar = self._numbers(kind, 1)[0].item()
            return number
        kind = self.u32()
        return self.strings(self.count(8)) if kind == _STRING else self._numbers(kind, self.count(1))

    def _numbers(self, kind: int, count: int) -> npt.NDArray[np.generic]:
        dtype = _DTYPES.get(kind)
        if dtype is None:
            self.fail(f"value type {kind} is not one of a GGUF file" + " (arrays do not nest)" * (kind == _ARRAY))
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _BOOL:
            return values
        if (values.view(np.uint8) > 1).any():
            self.fail("a boolean is neither 0 nor 1")
        return values.astype(np.bool_)

    def string(self) -> str:
        (text,) = self.strings(1)
        return text

    def strings(self, count: int) -> Strings:
        """Return ``count`` strings. Most of a header is its vocabulary, so this loop is written for speed."""
        data, offset, unpack, texts = self.data, self.offset, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack(data, offset)[0]
                texts.append(data[start:offset])
        except (struct.error, OverflowError):
            offset = max(offset, len(self.data)) + 1
        if offset > self.size:
            self.fail(f"string {len(texts)} of {count} goes past the end of the file")
        if offset > len(self.data):
            self._read_to(offset)
            return self.strings(count)
        self.offset = offset
        try:
            return Strings(texts)
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8 ({error.reason})")

    def tensor(self, name: str, start: int, quant: Quant, shape: tuple[int, ...], offset: int) -> Tensor:
        num_bytes = quant.row_bytes(shape[-1]) * (rows := int(np.prod([1, *shape[:-1]], dtype=object)))
        self.field, first = f"tensor {name}", start + offset
        if first + num_bytes > self.size:
            self.fail(f"{num_bytes} bytes needed, {max(0, self.size - first)} left in the file", at=first)
        return Tensor(FileRows(self.file, first, rows, num_bytes // rows), quant, shape)
