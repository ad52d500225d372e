"""Routes that tell what the server is: health, version and models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.openapi import Operation
from foreword.server.reply import reply


def routes_of(context: Context) -> list[Operation]:
    """/health, /ready, /version, /v1/models, /v1/models/{name}."""

    async def health(request: Request) -> Response:
        """The process answers."""
        return reply({"status": "ok"})

    async def ready(request: Request) -> Response:
        """The engine takes requests."""
        if context.engine.is_closed:
            raise HttpError(503, "the engine is closed")
        return reply({"status": "ready"})

    async def version(request: Request) -> Response:
        """The version of the server."""
        return reply({"version": __version__})

    async def models(request: Request) -> Response:
        """The names of the model and of its adapters in requests."""
        return reply({"object": "list", "data": [_model(context, name) for name in context.served]})

    async def model(request: Request) -> Response:
        """One of them."""
        return reply(_model(context, context.check_model(request.path_params["name"])))

    return [
        Operation("/health", health),
        Operation("/ready", ready),
        Operation("/version", version),
        Operation("/v1/models", models),
        Operation("/v1/models/{name:path}", model),
    ]


def _model(context: Context, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "foreword",
        "root": context.names[0],
        "parent": None if name in context.names else context.names[0],
        "max_model_len": context.engine.engine.states.max_model_len,
    }
