"""Operations that describe the server: health, version, models, metrics, and where cache events are published."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import ENGINE_CLOSED, NOT_READY
from foreword.server.operation import Operation
from foreword.server.replicas import ALL_LISTED, Replicas, Spread
from foreword.server.reply import reply


async def _health(server: Context | Replicas, request: Request) -> Response:
    return reply({"status": "ok"})


async def _ready(context: Context, request: Request) -> Response:
    if context.engine.is_closed:
        raise HttpError(ENGINE_CLOSED, "the engine is closed")
    return reply({"status": "ready"})


async def _front_ready(replicas: Replicas, request: Request) -> Response:
    states = await replicas.states()
    if not states:
        raise HttpError(NOT_READY, "no replica is ready")
    return reply({"status": "ready", "replicas": states})


async def _version(context: Context, request: Request) -> Response:
    return reply({"version": __version__})


async def _models(context: Context, request: Request) -> Response:
    return reply({"object": "list", "data": [_described(context, name) for name in context.served]})


async def _model(context: Context, request: Request) -> Response:
    return reply(_described(context, context.check_model(request.path_params["name"])))


def _described(context: Context, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "foreword",
        "root": context.names[0],
        "parent": None if name in context.names else context.names[0],
        "max_model_len": context.engine.engine.states.max_model_len,
        "default_sampling_params": context.engine.engine.suggested,
    }


async def _metrics(context: Context, request: Request) -> Response:
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _front_metrics(replicas: Replicas, request: Request) -> Response:
    return Response(await replicas.metrics(), media_type=CONTENT_TYPE_LATEST)


async def _sources(context: Context, request: Request) -> Response:
    return reply({"object": "list", "data": [] if context.kv_events is None else [context.kv_events]})


# fmt: off
OPERATIONS = (
    Operation(
        "/health", _health,
        access="public", summary="Report that the process runs.", replicas=Spread("front end", _health),
    ),
    Operation(
        "/ready", _ready,
        access="public", summary="Report that the engine takes requests.",
        details="The status is 503 if it is closed, or if no replica is ready.",
        replicas=Spread("front end", _front_ready),
    ),
    Operation("/version", _version, access="key", summary="Return the version of the server."),
    Operation("/v1/models", _models, access="key", summary="List the model and its adapters."),
    Operation(
        "/v1/models/{name:path}", _model,
        access="key", summary="Describe one model or adapter.",
        details="Requests may give its name as `model`; any other is answered with 404.",
    ),
    Operation(
        "/metrics", _metrics,
        access="key", summary="Return the metrics of the server for Prometheus.",
        replicas=Spread("all", _front_metrics), media_types=("text/plain",),
    ),
    Operation(
        "/kv_event_sources", _sources,
        access="key", summary="List where the cache's events are published.", replicas=ALL_LISTED,
    ),
)
