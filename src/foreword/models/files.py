"""Reading model files. Errors name the file and the fix."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from foreword.arrays import U8
from foreword.errors import ModelError

FETCH_AGAIN = "The file is damaged or incomplete: fetch it again"
"""The fix of errors about damaged files."""


class ModelFile:
    """A file that is open for reading while this object exists.

    What is read is copied: a file that is truncated or changed meanwhile is a ModelError, never a fault of memory.
    """

    def __init__(self, path: Path, at_least: int) -> None:
        """ModelError if the file cannot be read or has fewer than ``at_least`` bytes."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._opened = self._state()
        except OSError as error:
            raise self._unreadable(error) from None
        self.size = self._opened[0]
        if self.size < at_least:
            raise ModelError(f"{path}: {self.size} bytes are too few for a header of {at_least}. {FETCH_AGAIN}")

    def read(self, offset: int, count: int) -> U8:
        """Bytes [offset, offset + count). ModelError if the file cannot be read or is not as it was when opened."""
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

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _unreadable(self, error: OSError) -> ModelError:
        return ModelError(
            f"{self.path}: cannot be read ({error.strerror or error}). Check the path and its permissions"
        )


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
        """uint8 [num_rows, row_bytes]. ModelError as `ModelFile.read`."""
        return self.file.read(self.offset, self.nbytes).reshape(self.num_rows, self.row_bytes)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. ModelError if the file cannot be read or holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}). A model directory needs this file") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: invalid JSON ({error}). Fetch it again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a {type(values).__name__}, not a JSON object. Fetch it again")
    return cast(dict[str, Any], values)
