"""Reading model files, and values of metadata by type. Errors name the file and the fix."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from foreword.arrays import I64, U8
from foreword.errors import ModelError, reason_of
from foreword.hashes import sha256_of_files
from foreword.ownership import open_regular

T = TypeVar("T", int, float, bool, str)

FETCH_AGAIN = "The file is damaged or incomplete: fetch it again"
"""The fix of errors about damaged files."""
_PIECE = 1 << 22  # bytes


class ModelFile:
    """A file that is open for reading while this object exists.

    What is read is copied: a file that is truncated or changed meanwhile is a ModelError, never a fault of memory.

    identity: of the file as it was opened; see `identity_of`.
    """

    def __init__(self, path: Path, at_least: int) -> None:
        """Raise ModelError if the file cannot be read or has fewer than ``at_least`` bytes."""
        self.path = path
        try:
            self._descriptor = open_regular(path)
            weakref.finalize(self, os.close, self._descriptor)
            self._opened = self._state()
            self.identity = identity_of(os.fstat(self._descriptor))
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise self._unreadable(error) from None
        self.size = self._opened[0]
        if self.size < at_least:
            raise ModelError(f"{path}: {self.size} bytes are too few for a header of {at_least}. {FETCH_AGAIN}")

    def read(self, offset: int, count: int) -> U8:
        """Return bytes [offset, offset + count).

        Raise ModelError if the file cannot be read or is not as it was when opened.
        """
        data = np.empty(count, np.uint8)
        done = 0
        try:
            unchanged = self._state() == self._opened
            while unchanged and done < count:
                got = os.preadv(self._descriptor, [data[done:]], offset + done)  # type: ignore[list-item]
                done, unchanged = done + got, got > 0
        except OSError as error:
            raise self._unreadable(error) from None
        if not unchanged:
            raise ModelError(f"{self.path}: was changed while it was in use. Load the model again")
        return data

    def sha256(self) -> str:
        """Return the digest of all bytes, in hexadecimal. Raise ModelError as `read`."""
        digest = sha256_of_files()
        for offset in range(0, self.size, _PIECE):
            digest.update(self.read(offset, min(_PIECE, self.size - offset)).data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Callable[..., ModelFile], tuple[Path, tuple[int, int]]]:
        """Return what another process needs: the file is opened again there, and is an error if it changed."""
        return _opened_again, (self.path, self._opened)

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _unreadable(self, error: OSError | ValueError) -> ModelError:
        return ModelError(f"{self.path}: cannot be read ({reason_of(error)}). Check the path and its permissions")


def identity_of(status: os.stat_result) -> str:
    """Return a text that no other file of this machine has, nor this one after a change of its bytes.

    The system sets the time of the last change of a file's state itself, in its own steps, of some milliseconds: a file
    that changed just now may change again and keep it.
    """
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join(map(str, numbers))


class StoredRows(Protocol):
    """Rows of bytes that every `read` makes again."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> StoredRows: ...

    def read(self) -> U8:
        """Return uint8 [rows, row_bytes]. Raise ModelError as `ModelFile.read` does, and if the rows hold what no
        weight can be.
        """


def _opened_again(path: Path, state: tuple[int, int]) -> ModelFile:
    file = ModelFile(path, 0)
    file._opened = state
    return file


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """Rows of bytes in a file, which `read` copies out of it."""

    file: ModelFile
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: slice) -> FileRows:
        start, stop, _ = rows.indices(self.num_rows)
        return FileRows(self.file, self.offset + start * self.row_bytes, max(0, stop - start), self.row_bytes)

    def read(self) -> U8:
        """Return uint8 [num_rows, row_bytes]. Raise ModelError as `ModelFile.read` does."""
        return self.file.read(self.offset, self.nbytes).reshape(self.num_rows, self.row_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedRows:
    """Some stored rows, in any order: row i is ``rows[order[i]]``."""

    rows: StoredRows
    order: I64

    @property
    def nbytes(self) -> int:
        return len(self.order) * self.rows.nbytes // max(1, len(self.rows))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> OrderedRows:
        return OrderedRows(self.rows, self.order[rows])

    def read(self) -> U8:
        if not len(self.order):
            return self.rows[:0].read()
        first = int(self.order.min())
        return self.rows[first : int(self.order.max()) + 1].read()[self.order - first]


@dataclass(frozen=True, slots=True, eq=False)
class TransposedRows:
    """Columns [start, stop) of a matrix, as rows. element_bytes: of a number."""

    matrix: U8 | StoredRows
    element_bytes: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return len(self) * len(self.matrix) * self.element_bytes

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: slice) -> TransposedRows:
        start, stop, _ = rows.indices(len(self))
        return TransposedRows(self.matrix, self.element_bytes, self.start + start, self.start + max(start, stop))

    def read(self) -> U8:
        data = self.matrix if isinstance(self.matrix, np.ndarray) else self.matrix.read()
        numbers = data.reshape(len(self.matrix), -1, self.element_bytes)[:, self.start : self.stop]
        return np.ascontiguousarray(numbers.swapaxes(0, 1)).reshape(len(self), -1)


def typed_value(values: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of a key, where None counts as absent. TypeError says what is wrong with it: it is absent
    without a default, it is not a ``kind``, or it is a float that is not finite. An int is also a float.
    """
    value = values.get(key)
    value = default if value is None else value
    if kind is float and type(value) is int and abs(value) < 1 << 62:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        found = "is missing" if value is None else f"is {value!r:.80}, not of type {kind.__name__}"
        raise TypeError(f"{key} {found}")
    return value


def check_overlap(path: Path, spans: Iterable[tuple[int, int, str]]) -> None:
    """Raise ModelError, which names two tensors whose bytes (first, last + 1, name) overlap, if there are any."""
    for (_, end, name), (first, _, other) in pairwise(sorted(spans)):
        if first < end:
            raise ModelError(f"{path}: tensors {name!r:.80} and {other!r:.80} overlap. {FETCH_AGAIN}")
