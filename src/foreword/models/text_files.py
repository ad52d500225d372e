"""Reading the small files of a model's directory: configurations, tokenizers, templates and indices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from foreword.errors import ModelError, reason_of
from foreword.jsonfile import parse_object
from foreword.ownership import open_regular

MAX_BYTES = 1 << 29
"""The largest file that is read. Tokenizers of 256,000 tokens have 35 MB."""


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes. Raise ModelError if it cannot be read, is not a regular file but a pipe or a device,
    or has more than `MAX_BYTES` bytes.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= MAX_BYTES else b""
    except (OSError, ValueError) as fault:  # ValueError: a null byte in the name
        raise ModelError(f"{path}: cannot be read ({reason_of(fault)}). Check the path and its permissions") from None
    if size > MAX_BYTES:
        raise ModelError(f"{path}: has more than {MAX_BYTES} bytes. Fetch it again")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raise ModelError as `read_bytes` does, and for other contents."""
    return parse_object(read_bytes(path), path, ModelError)
