"""The time that a request has: what its body, its header and the server say."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from foreword.fields import NUMBER
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID

TIMEOUT = "x-request-timeout"
"""The header with a request's time in seconds; in a body it is the field ``timeout``."""


def deadline(request: Request, body: dict[str, Any], config: ServerConfig) -> float | None:
    """Take ``timeout`` out of a body, and return when the time of its request is over, on the clock of the event loop;
    None: never. It begins with the first call for the request. Raise HttpError 400 for what is not one.
    """
    scope = request.scope
    if "deadline" not in scope:
        seconds = _seconds(request, body, config.timeout)
        scope["deadline"] = None if seconds is None else asyncio.get_running_loop().time() + seconds
    found: float | None = scope["deadline"]
    return found


def _seconds(request: Request, body: dict[str, Any], most: float | None) -> float | None:
    field, value = "timeout", body.pop("timeout", None)
    if value is None and TIMEOUT in request.headers:
        field, value = TIMEOUT, _number(request.headers[TIMEOUT])
    if value is None:
        return most
    if not NUMBER.accepts(value) or not 0 < value < 2**31:
        raise HttpError(INVALID, f"{field} = {value!r:.80}: expected seconds above 0", param=field)
    return float(value) if most is None else min(value, most)


def _number(text: str) -> float | str:
    """Return a text as a number. A text that is not a number is returned unchanged, so that it is refused later."""
    try:
        return float(text)
    except ValueError:
        return text
