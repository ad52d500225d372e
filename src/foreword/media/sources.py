"""Read the bytes of files from data URLs, bytes, files and URLs, within limits."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import NoReturn

from foreword.errors import RequestError
from foreword.media.limits import MediaLimits


def read_file(field: str, source: object, limits: MediaLimits) -> bytes:
    """Return the content of a file, given as a ``data:`` URL, an http(s) URL, a path, or its bytes.

    Raise a RequestError with the field if the source is not allowed or cannot be read, or the file is above the limit.
    """
    data = _bytes_of(field, source, limits)
    if len(data) > limits.max_bytes:
        fail(field, f"{len(data)} bytes", f"a file may have {limits.max_bytes}", "Give a smaller file.")
    return data


def fail(field: str, value: object, reason: str, fix: str) -> NoReturn:
    """Raise RequestError for a field of a request that has no id yet."""
    raise RequestError(None, field, value, reason, fix)


def _bytes_of(field: str, source: object, limits: MediaLimits) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return _of_file(field, source, limits)
    if not isinstance(source, str):
        fix = "Give a data: URL, the bytes of a file, or a path."
        fail(field, source, "is not a file", fix)
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_data_url(field, source, limits)
    if scheme in ("http", "https"):
        from foreword.media.remote import fetch  # imported here, because its imports are slow

        return fetch(field, source, limits)
    return _of_file(field, Path(source.removeprefix("file://")), limits)


def _of_data_url(field: str, url: str, limits: MediaLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        fail(field, url[:60], "is not a data: URL of base64", "Give data:TYPE;base64,….")
    if len(body) * 3 // 4 - 2 > limits.max_bytes:
        fail(field, f"{len(body)} characters", f"a file may have {limits.max_bytes} bytes", "Give a smaller file.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        fail(field, url[:60], f"is not base64 ({error!s:.100})", "Give data:TYPE;base64,….")


def _of_file(field: str, path: Path, limits: MediaLimits) -> bytes:
    if not limits.local_files:
        fail(field, str(path), "files of this machine are not read", "Give a data: URL.")
    try:
        if not path.is_file():
            fail(field, str(path), "file not found", "Give the path of a file.")
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        fail(field, str(path)[:200], f"cannot be read ({error!s:.100})", "Give the path of a file that can be read.")
