"""Catch what decoders in C print on standard error, which belongs in the error of the file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from threading import Lock

MOST_PRINTED = 512  # bytes that are kept
_UNBUFFERED = 2  # _IONBF of <stdio.h>
_CAPTURING = Lock()  # C has one `stderr` per process


@dataclass(slots=True)
class Printed:
    """text: the first line that was printed, without the place in the decoder's source; "" for none."""

    text: str = ""


class SeekableBytes(BytesIO):
    """A file in memory that stays where it is when a decoder seeks a place that no file has, where others raise."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


@contextmanager
def captured(printed: Printed) -> Iterator[None]:
    """Within the block, keep the beginning of what C code prints on its `stderr`; its first line is then ``printed``.

    Python's own streams are not concerned. One thread at a time is in such a block. Where the C library is not glibc,
    nothing is captured.
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
