"""Routes about the requests in the engine: what they do, why they wait, and their end; and /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from foreword.fields import STRING, Fields
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.openapi import Body, Operation
from foreword.server.reply import json_body, reply


def routes_of(context: Context) -> list[Operation]:
    """/requests, /requests/{id}/why, /abort, /reset_prefix_cache, /metrics."""
    serving, engine = context.engine, context.engine.engine

    async def requests(request: Request) -> Response:
        """The requests in the engine, and why each waits."""
        names = serving.request_ids
        states = await serving.call(lambda: [_state(name) for name in names])
        preparing = sorted(name for name, progress in context.progress.items() if not progress.names)
        return reply({"object": "list", "data": [*map(_in_preparation, preparing), *states]})

    async def why(request: Request) -> Response:
        """Why a request waits; its id is the header X-Request-Id of its response."""
        name = request.path_params["id"]
        names = _in_engine(name)
        if not names:
            return reply(_in_preparation(name))
        states = await serving.call(lambda: [_state(name) for name in names])
        return reply(states[0] if names == [name] else {"id": name, "state": states[0]["state"], "parts": states})

    async def abort(request: Request) -> Response:
        """End a request with its tokens so far."""
        name = parse_abort(await json_body(request))
        for part in _in_engine(name):
            serving.abort(part)
        if name in context.progress:
            context.progress[name].is_aborted = True
        return reply({"request_id": name, "aborted": True})

    async def reset(request: Request) -> Response:
        """Forget all cached prefixes, if no request runs."""
        parse_reset(await json_body(request))
        return reply({"reset": await serving.call(engine.reset_prefix_cache)})

    async def metrics(request: Request) -> Response:
        """What the server has done, for Prometheus."""
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _in_engine(name: str) -> list[str]:
        """The requests in the engine of an id: the one that has it, or those of the HTTP request that has it. None
        while they are prepared; HttpError 404 if there are none.
        """
        running = serving.request_ids
        progress = context.progress.get(name)
        names = [part for part in ((name,) if progress is None else progress.names) if part in running]
        if not names and (progress is None or progress.names):
            raise HttpError(404, f"request {name!r:.80}: is not in the engine, or has ended", param="request_id")
        return names

    def _state(name: str) -> dict[str, Any]:
        """In the engine's thread."""
        found = engine.why(name)
        code = "new" if found.code == "unknown" else found.code
        return {"id": name, "state": code, "why": str(found) if code == found.code else "new", **dict(found.details)}

    return [
        Operation("/requests", requests),
        Operation("/requests/{id}/why", why),
        Operation("/abort", abort, Body(parse_abort, {"request_id": "id"})),
        Operation("/reset_prefix_cache", reset, Body(parse_reset, {})),
        Operation("/metrics", metrics, media_types=("text/plain",)),
    ]


def _in_preparation(name: str) -> dict[str, Any]:
    return {"id": name, "state": "preparing", "why": "preparing"}


def parse_abort(body: object) -> str:
    """The id in a body of /abort."""
    given = Fields(body)
    name: str = given.require("request_id", STRING)
    given.end()
    return name


def parse_reset(body: object) -> None:
    """A body of /reset_prefix_cache has no fields."""
    Fields(body).end()
