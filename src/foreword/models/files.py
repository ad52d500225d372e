"""Mapping and reading model files. Errors name the file and the fix."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, cast

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
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"{path}: cannot be read ({reason}). Check the path and its permissions") from None


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
