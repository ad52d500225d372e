"""Read images from data URLs, bytes, files, URLs and Pillow's objects. Limits are checked before an image is
decoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any, NoReturn

import numpy as np

from foreword.errors import RequestError
from foreword.hashes import blake2b
from foreword.installation import install
from foreword.media.limits import MediaLimits
from foreword.media.sources import fail, read_file

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LONGEST = 200
"""Most of a side per pixel of the other: processors that scale the shorter side make the longer one as much longer."""


@dataclass(frozen=True, eq=False)
class Image:
    """An image as RGB. field: its path in the messages, such as ``messages[0].content[1]``. pixels: an image of
    Pillow. processing: values in place of those of the configuration of the model's processor.
    """

    field: str
    pixels: Any
    processing: Mapping[str, object] = dataclasses.field(default_factory=dict)
    kind = "image"

    @property
    def content(self) -> Any:
        """The pixels, as processors read them."""
        return self.pixels

    @property
    def size(self) -> str:
        """The size, as messages show it."""
        return " × ".join(map(str, self.pixels.size)) + " pixels"

    @cached_property
    def digest(self) -> str:
        """Return a hash of its content and processing: equal images have equal hashes, regardless of their source."""
        asked = sorted(self.processing.items())
        hashed = blake2b(repr((self.pixels.size, asked)).encode(), digest_size=16)
        hashed.update(self.pixels.tobytes())
        return hashed.hexdigest()


def read_image(field: str, source: object, limits: MediaLimits) -> Image:
    """Return an image from a source that `read_file` takes, or from an object of Pillow.

    Values of 16 bits become the nearest ones of 8: v / 257, those of 12 bits of a TIFF file 255 v / 4095. Raise
    RequestError as `read_file` does, and if the data is not an image, damaged, or beyond the limits, or its values are
    of 32 bits, whose range is not known.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ModuleNotFoundError:
        raise RequestError(None, field, source, "needs Pillow", install("images")) from None
    if isinstance(source, pillow.Image):
        opened = source
    else:
        data = read_file(field, source, limits)
        fix = f"Give a file of the type {', '.join(FORMATS)}."
        if not data:
            fail(field, "0 bytes", "is empty", fix)
        try:
            opened = pillow.open(BytesIO(data), formats=FORMATS)
        except pillow.DecompressionBombError:
            _fail_size(field, "its file", limits)
        except UnidentifiedImageError:  # its text is only the address of the data in memory
            fail(field, f"{len(data)} bytes", "is not an image", fix)
        except Exception as error:  # decoders raise errors of any kind
            fail(field, f"{len(data)} bytes", f"is not an image ({error!s:.100})", fix)
    width, height = opened.size
    if width * height > limits.max_pixels or not width * height:
        _fail_size(field, f"{width} × {height} pixels", limits)
    if max(width, height) > LONGEST * min(width, height):
        fix = "Cut it into pieces."
        fail(field, f"{width} × {height} pixels", f"a side may be {LONGEST} times as long as the other", fix)
    if opened.mode in ("I", "F"):  # Pillow would cut its values off at 255
        reason, fix = "its values have no range that is known", "Convert it to 8 or 16 bits per channel."
        fail(field, f"{width} × {height} pixels of 32 bits (mode {opened.mode})", reason, fix)
    try:
        most = (1 << _num_bits(opened)) - 1
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I;16"):
            levels = np.asarray(upright.convert("I"))
            upright = pillow.fromarray(((510 * levels + most) // (2 * most)).astype(np.uint8))
        return Image(field, upright.convert("RGB"))
    except Exception as error:  # decoders raise errors of any kind
        fail(field, f"{width} × {height} pixels", f"is damaged ({error!s:.100})", "Check the file.")


def _num_bits(image: Any) -> int:
    """Return the bits of the values of an image of Pillow's modes I;16, which TIFF files of 12 bits have, too."""
    from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

    return int(image.tag_v2.get(BITSPERSAMPLE, (16,))[0]) if isinstance(image, TiffImageFile) else 16


def _fail_size(field: str, got: str, limits: MediaLimits) -> NoReturn:
    fail(field, got, f"an image may have 1 to {limits.max_pixels} pixels", "Give a smaller image.")
