"""Catch text that decoders in C print on standard error, so that the error about the file can contain it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from threading import Lock

MOST_PRINTED = 512  # most bytes that are kept
_UNBUFFERED = 2  # _IONBF of <stdio.h>
_CAPTURING = Lock()  # C has one `stderr` per process


@dataclass(slots=True)
class Printed:
    """The printed text. text: the first line, without the place in the decoder's source; "" for none."""

    text: str = ""


class SeekableBytes(BytesIO):
    """A file in memory whose position does not change when a decoder seeks an invalid position. (Other files raise an
    error.)
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


@contextmanager
def captured(printed: Printed) -> Iterator[None]:
    """Within the block, capture the beginning of the text that C code prints on its `stderr`. Afterwards, ``printed``
    has its first line.

    Python's own streams are not affected. Only one thread at a time runs in such a block. If the C library is not
    glibc, nothing is captured.
    """
    if not _is_glibc():
        yield
        return
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(MOST_PRINTED)
    libc.fmemopen.restype = ctypes.c_void_p
    stderr = ctypes.c_void_p.in_dll(libc, "stderr")
    with _CAPTURING:
        stream, before = ctypes.c_void_p(libc.fmemopen(buffer, ctypes.c_size_t(MOST_PRINTED), b"w")), stderr.value
        libc.setvbuf(stream, None, _UNBUFFERED, ctypes.c_size_t(0))
        stderr.value = stream.value
        try:
            yield
        finally:
            stderr.value = before
            libc.fclose(stream)
            lines = buffer.value.decode(errors="replace").split("\n")
            printed.text = next((line.rpartition("] ")[2].strip() for line in lines if line.strip()), "")


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, AttributeError):
        return False
