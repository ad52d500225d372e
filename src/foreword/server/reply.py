"""Bodies of requests and responses as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.errors import HttpError


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON value."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. HttpError 400 for anything else."""
    try:
        value = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"body: is not JSON: {error}", param="body") from None
    if not isinstance(value, dict):
        raise HttpError(400, 'body: expected a JSON object. Give {"model": "…", …}.', param="body")
    return value
