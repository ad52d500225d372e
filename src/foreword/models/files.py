"""Mapping model files. Errors name the file and the fix."""

from __future__ import annotations

import mmap
from pathlib import Path

from foreword.errors import ModelError

FETCH_AGAIN = "The file is damaged or incomplete: fetch it again"
"""The fix of errors about damaged files."""


def map_file(path: Path, at_least: int) -> mmap.mmap:
    """The file's bytes, mapped for reading. ModelError if it cannot be read or has fewer than ``at_least`` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < at_least:
                raise ModelError(f"{path}: {size} bytes are too few for a header of {at_least}. {FETCH_AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path}: cannot be read ({reason}). Check the path and its permissions") from None
