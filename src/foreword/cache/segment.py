"""A file of blocks, which is written once as a whole. Each block has a checksum.

    header    magic, key of the format, bytes of a block, number of blocks, bytes of the note; CRC-32 of all up to the
              first block
    table     of each block: name (18 bytes), CRC-32 of its bytes
    note      any bytes of the writer, returned to readers
    blocks    their bytes, one after the other

A file gets its name when all of it is written, so that it is whole or absent whenever its writer is killed. Where the
machine itself fails, the checksums find what was not written. Files are readable by their owner alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import numpy as np

from foreword.arrays import U8
from foreword.cache.tiers import NAME_BYTES, BlockFormat
from foreword.ownership import open_regular

MAGIC = b"FWBLOCK1"
SUFFIX = ".blocks"
MOST_BLOCKS = 1 << 20
MOST_NOTE = 1 << 28  # bytes
_HEADER = Struct("<8s16sQII")
_CHECK = Struct("<I")
_ENTRY = np.dtype([("name", f"V{NAME_BYTES}"), ("check", "<u4")])


class DamagedError(Exception):
    """A file that is not one of blocks of this format, or not all of one."""


class Segment(NamedTuple):
    """The header, table and note of a file. start: the offset of the first block."""

    path: Path
    names: tuple[bytes, ...]
    checks: tuple[int, ...]
    start: int
    note: bytes = b""


def segment_bytes(blocks: BlockFormat, count: int) -> int:
    """Return the size of a file of this many blocks."""
    return _HEADER.size + _CHECK.size + count * (_ENTRY.itemsize + blocks.block_bytes)


def write_segment(path: Path, blocks: BlockFormat, names: Sequence[bytes], data: U8, note: bytes = b"") -> Segment:
    """Write a file of blocks, uint8 [len(names), block_bytes]. Raise OSError if that fails; then there is none."""
    table = np.zeros(len(names), _ENTRY)
    table["name"] = np.frombuffer(b"".join(names), f"V{NAME_BYTES}")
    table["check"] = checks = [crc32(block.data) for block in data]
    header = _HEADER.pack(MAGIC, blocks.key, blocks.block_bytes, len(names), len(note)) + table.tobytes() + note
    head = header[: _HEADER.size] + _CHECK.pack(crc32(header)) + header[_HEADER.size :]
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            for part in (memoryview(head), data.reshape(-1).data):
                while part:
                    part = part[file.write(part) :]
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return Segment(path, tuple(names), tuple(checks), len(head), note)


def read_segment(path: Path, blocks: BlockFormat) -> Segment:
    """Read the beginning of a file. Raise DamagedError unless it is one of this format; OSError if it cannot be read,
    or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        head = file.read(_HEADER.size + _CHECK.size) or b""
        if len(head) < _HEADER.size + _CHECK.size:
            raise DamagedError(f"{path}: is too short")
        magic, key, size, count, note_bytes = _HEADER.unpack_from(head)
        is_known = (magic, key, size) == (MAGIC, blocks.key, blocks.block_bytes)
        if not is_known or count > MOST_BLOCKS or note_bytes > MOST_NOTE:
            raise DamagedError(f"{path}: is not a file of blocks of this model and version")
        if os.fstat(file.fileno()).st_size < segment_bytes(blocks, count) + note_bytes:
            raise DamagedError(f"{path}: is not complete")
        table = file.read(count * _ENTRY.itemsize + note_bytes) or b""
        if crc32(table, crc32(head[: _HEADER.size])) != _CHECK.unpack_from(head, _HEADER.size)[0]:
            raise DamagedError(f"{path}: its table is damaged")
    entries = np.frombuffer(table, _ENTRY, count)
    names = tuple(entry.tobytes() for entry in entries["name"])
    note = table[len(table) - note_bytes :]
    return Segment(path, names, tuple(entries["check"].tolist()), len(head) + len(table), note)


def read_blocks(segment: Segment, indices: Sequence[int], blocks: BlockFormat, data: U8, rows: Sequence[int]) -> None:
    """Read block indices[i] into data[rows[i]]. Raise DamagedError for bytes that do not have their checksum."""
    with os.fdopen(open_regular(segment.path), "rb", buffering=0) as file:
        for index, row in zip(indices, rows, strict=True):
            part = data[row]
            count = os.preadv(file.fileno(), [part.data], segment.start + index * blocks.block_bytes)
            if count != blocks.block_bytes or crc32(part.data) != segment.checks[index]:
                raise DamagedError(f"{segment.path}: block {index} is damaged")
