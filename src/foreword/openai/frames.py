"""Streams of an answer: the bytes of a server-sent event, and the interface that all streams have."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams: server-sent events, and lines of JSON, as Ollama's."""
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


ESCAPE = "backslashreplace"
"""Half a surrogate pair, which UTF-8 cannot write, becomes the escape that JSON has for it."""
_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def encoded(frames: str) -> bytes:
    """Return frames of JSON as bytes. Characters at which Unicode, and so some clients, end a line are escaped."""
    return (frames if frames.isascii() else frames.translate(_SEPARATORS)).encode(errors=ESCAPE)


def named_frame(event: str, body: dict[str, Any]) -> bytes:
    """Return an event with a name, as in Anthropic's Messages and OpenAI's Responses."""
    return f"event: {event}\ndata: {_encode(body)}\n\n".encode("ascii")


def json_string(text: str) -> str:
    """Return a text as a JSON string in ASCII, for frames that are made from a prebuilt part."""
    return _encode(text)


class AnswerStream(Generic[T]):
    """The frames of one answer, made from its outputs as they arrive. keep_alive: the frame that is sent while the
    stream is idle, b"" for none.
    """

    __slots__ = ()
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    media_type: ClassVar[str] = EVENTS

    def frames(self, output: T) -> bytes:
        """Return the frames of an output, b"" if it adds nothing."""
        raise NotImplementedError

    def size(self, output: T) -> int:
        """Return an estimate of the number of values in its frames, which determines how long it takes to make them."""
        return 1

    def waits(self, output: T) -> bool:
        """Return whether creating its frames waits for a disk."""
        return False

    def end(self) -> bytes:
        """Return the frames that follow those of the last output."""
        return b""

    def failed(self, message: str) -> bytes | None:
        """Return the frames that end a failed answer, or None for the error frame of the interface."""
        return None
