"""Server-sent events: the bytes of one."""

from __future__ import annotations

import json
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def named_frame(event: str, body: dict[str, Any]) -> bytes:
    """An event with a name, as Anthropic's Messages and OpenAI's Responses have them."""
    return f"event: {event}\ndata: {_encode(body)}\n\n".encode("ascii")


def json_string(text: str) -> str:
    """A text as a JSON string in ASCII, for frames made from a prebuilt part."""
    return _encode(text)
