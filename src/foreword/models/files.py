"""Files of models, mapped or read, with errors that say which one and what to do."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, cast

from foreword.errors import ModelError


def map_file(path: Path, at_least: int) -> mmap.mmap:
    """The file's bytes, mapped for reading. ModelError if it cannot be read or has fewer than ``at_least`` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < at_least:
                raise ModelError(f"{path}: {size} bytes are too few for a header of {at_least}. "
                                 "The file is damaged or incomplete: fetch it again")  # fmt: skip
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"{path}: cannot be read ({reason}). Check the path and its permissions") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ModelError if the file cannot be read or holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}). A model's directory needs it") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: no valid JSON ({error}). Fetch it again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a {type(values).__name__}, not a JSON object. Fetch it again")
    return cast(dict[str, Any], values)
