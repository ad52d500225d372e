"""A body as JSON, in pieces: what is long in it is made while it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

PIECE = 64 << 10  # bytes


class _IteratorFound(Exception):
    """The value cannot be written as a whole."""


def _refuse(value: object) -> None:
    raise _IteratorFound if isinstance(value, Iterator) else TypeError(f"JSON has no {type(value).__name__}")


_encode = msgspec.json.Encoder(enc_hook=_refuse).encode


def json_pieces(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the JSON text of a body in pieces of about `PIECE` bytes. Iterators in it are written as lists, and each
    item is made when it is written: so a long answer takes the memory of a piece, and each piece a short time.
    """
    parts: list[bytes] = []
    size = 0
    for part in _parts(body):
        parts.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def _parts(value: Any) -> Iterator[bytes]:
    try:
        yield _encode(value)
    except _IteratorFound:
        if isinstance(value, dict):
            for i, (name, item) in enumerate(value.items()):
                yield b"%s%s:" % (b"," if i else b"{", _encode(name))
                yield from _parts(item)
            yield b"}"
        else:
            yield b"["
            for i, item in enumerate(value):
                if i:
                    yield b","
                yield from _parts(item)
            yield b"]"
