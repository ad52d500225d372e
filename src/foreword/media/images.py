"""Images from data URLs, bytes, files, URLs and Pillow's objects. What is read is limited before it is decoded."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from foreword.errors import RequestError
from foreword.media.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True, eq=False)
class Image:
    """An image as RGB. field: where it is in the messages, such as ``messages[0].content[1]``. pixels: of Pillow."""

    field: str
    pixels: Any

    @cached_property
    def digest(self) -> str:
        """A hash of its content: equal images have one, however they were given."""
        hashed = blake2b(repr(self.pixels.size).encode(), digest_size=16)
        hashed.update(self.pixels.tobytes())
        return hashed.hexdigest()


def read_image(field: str, source: object, limits: MediaLimits) -> Image:
    """An image from a ``data:`` URL, an http(s) URL, a path, the bytes of a file, or an object of Pillow.

    RequestError with the field for a source that is not allowed, and for data that is no image, damaged, or beyond the
    limits.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ModuleNotFoundError:
        raise RequestError(None, field, source, "needs Pillow", "`pip install foreword[vision]`.") from None
    if isinstance(source, pillow.Image):
        opened = source
    else:
        data = _bytes_of(field, source, limits)
        if len(data) > limits.max_bytes:
            _fail(field, f"{len(data)} bytes", f"an image may have {limits.max_bytes}", "Give a smaller file.")
        try:
            opened = pillow.open(BytesIO(data), formats=FORMATS)
        except pillow.DecompressionBombError:
            _fail_size(field, "its file", limits)
        except Exception as error:  # of decoders, of any kind
            reason, fix = f"is no image ({error!s:.100})", f"Give a file of the type {', '.join(FORMATS)}."
            _fail(field, f"{len(data)} bytes", reason, fix)
    width, height = opened.size
    if width * height > limits.max_pixels or not width * height:
        _fail_size(field, f"{width} × {height} pixels", limits)
    try:
        return Image(field, ImageOps.exif_transpose(opened).convert("RGB"))
    except Exception as error:  # of decoders, of any kind
        _fail(field, f"{width} × {height} pixels", f"is damaged ({error!s:.100})", "Check the file.")


def _bytes_of(field: str, source: object, limits: MediaLimits) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return _of_file(field, source, limits)
    if not isinstance(source, str):
        fix = "Give a data: URL, the bytes of a file, a path, or an image of Pillow."
        _fail(field, source, "is no image", fix)
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_data_url(field, source, limits)
    if scheme in ("http", "https"):
        from foreword.media.remote import fetch  # what it needs is slow to import

        return fetch(field, source, limits)
    return _of_file(field, Path(source.removeprefix("file://")), limits)


def _of_data_url(field: str, url: str, limits: MediaLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        _fail(field, url[:60], "is no data: URL of base64", "Give data:image/png;base64,….")
    if len(body) * 3 // 4 - 2 > limits.max_bytes:
        _fail(field, f"{len(body)} characters", f"an image may have {limits.max_bytes} bytes", "Give a smaller file.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        _fail(field, url[:60], f"is not base64 ({error!s:.100})", "Give data:image/png;base64,….")


def _of_file(field: str, path: Path, limits: MediaLimits) -> bytes:
    if not limits.local_files:
        _fail(field, str(path), "files of this machine are not read", "Give a data: URL.")
    try:
        if not path.is_file():
            _fail(field, str(path), "is no file", "Give the path of an image.")
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        _fail(field, str(path)[:200], f"cannot be read ({error!s:.100})", "Check the file.")


def _fail_size(field: str, got: str, limits: MediaLimits) -> NoReturn:
    _fail(field, got, f"an image may have 1 to {limits.max_pixels} pixels", "Give a smaller image.")


def _fail(field: str, value: object, reason: str, fix: str) -> NoReturn:
    raise RequestError(None, field, value, reason, fix)
