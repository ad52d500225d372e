"""Routes about the requests in the engine: what they do, why they wait, and their end; and /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foreword.fields import STRING, Fields
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.reply import json_body, reply


def routes_of(context: Context) -> list[Route]:
    """/requests, /requests/{id}/why, /abort, /reset_prefix_cache, /metrics."""
    serving, engine = context.engine, context.engine.engine

    async def requests(request: Request) -> Response:
        names = serving.request_ids
        states = await serving.call(lambda: [_state(name) for name in names])
        return reply({"object": "list", "data": states})

    async def why(request: Request) -> Response:
        name = request.path_params["id"]
        _check_known(name)
        return reply(await serving.call(lambda: _state(name)))

    async def abort(request: Request) -> Response:
        given = Fields(await json_body(request))
        name = given.require("request_id", STRING)
        given.end()
        _check_known(name)
        serving.abort(name)
        return reply({"request_id": name, "aborted": True})

    async def reset(request: Request) -> Response:
        return reply({"reset": await serving.call(engine.reset_prefix_cache)})

    async def metrics(request: Request) -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _check_known(name: str) -> None:
        if name not in serving.request_ids:
            raise HttpError(404, f"request {name!r:.80}: is not in the engine, or has ended", param="request_id")

    def _state(name: str) -> dict[str, Any]:
        """In the engine's thread."""
        found = engine.why(name)
        code = "new" if found.code == "unknown" else found.code
        return {"id": name, "state": code, "why": str(found) if code == found.code else "new", **dict(found.details)}

    return [
        Route("/requests", requests),
        Route("/requests/{id}/why", why),
        Route("/abort", abort, methods=["POST"]),
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/metrics", metrics),
    ]
