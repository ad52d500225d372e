"""Bodies of requests and responses as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.errors import HttpError

T = TypeVar("T")
LARGE = 64 << 10  # bytes of a body that is worth a thread


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON value."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. HttpError 400 for anything else, 415 if it is sent as such."""
    # A web page of another origin cannot send this type without being asked about it first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "send the body as JSON, with the header Content-Type: application/json")
    data = await request.body()
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"body: is not JSON: {error}", param="body") from None
    if not isinstance(value, dict):
        raise HttpError(400, 'body: expected a JSON object. Give {"model": "…", …}.', param="body")
    return value


async def parsed(parse: Callable[[dict[str, Any]], T], body: dict[str, Any], request: Request) -> T:
    """``parse(body)``, of a large body outside the event loop."""
    if int(request.headers.get("content-length", LARGE)) < LARGE:
        return parse(body)
    return await asyncio.to_thread(parse, body)
