"""Operations that describe the server: health, version, models, metrics, and where cache events are published."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import ENGINE_CLOSED, NOT_READY
from foreword.server.models import ModelEntry, Models
from foreword.server.models_metrics import ModelsMetrics
from foreword.server.operation import OfServer, Operation
from foreword.server.pooling_routes import pools
from foreword.server.replicas import ALL_LISTED, Replicas, Spread
from foreword.server.reply import reply


async def _health(server: Models | Replicas, request: Request) -> Response:
    return reply({"status": "ok"})


async def _ready(models: Models, request: Request) -> Response:
    if any(context.engine.is_closed for _, context in models.loaded):
        raise HttpError(ENGINE_CLOSED, "the engine is closed")
    if models.single is not None:
        return reply({"status": "ready"})
    return reply({"status": "ready", "models": {entry.name: entry.state for entry in models.entries}})


async def _front_ready(replicas: Replicas, request: Request) -> Response:
    states = await replicas.states()
    if not states:
        raise HttpError(NOT_READY, "no replica is ready")
    return reply({"status": "ready", "replicas": states})


async def _version(models: Models, request: Request) -> Response:
    return reply({"version": __version__})


async def _models(models: Models, request: Request) -> Response:
    data = [_described(models, entry, name) for entry in models.entries for name in entry.names]
    return reply({"object": "list", "data": data})


async def _model(models: Models, request: Request) -> Response:
    entry = models.find(name := request.path_params["name"])
    return reply(_described(models, entry, name if name in entry.names else name.removesuffix(":latest")))


def _described(models: Models, entry: ModelEntry, name: str) -> dict[str, object]:
    """Return what is known of a model or adapter. Of several models, also its state and the bytes of its memory."""
    context = entry.context
    found = {
        "id": name,
        "object": "model",
        "created": models.created if context is None else context.created,
        "owned_by": "foreword",
        "root": entry.name,
        "parent": None if name in entry.served.names else entry.name,
        "max_model_len": None if context is None else context.engine.engine.states.max_model_len,
        "tasks": [] if context is None else _tasks(context),
        "default_sampling_params": {} if context is None else context.engine.engine.suggested,
    }
    if models.single is not None:
        return found
    of_memory = {"state": entry.state, "bytes": entry.num_bytes or None, "pinned": entry.served.pin}
    return {**found, **of_memory, "error": entry.error or None}


def _tasks(context: Context) -> list[str]:
    """Return what the model can do."""
    return [*(["generate"] if context.engine.engine.generates else []), *(["embed"] if pools(context) else [])]


async def _metrics(models: Models, request: Request) -> Response:
    text = ModelsMetrics(models).text() if models.single is None else models.single.metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _front_metrics(replicas: Replicas, request: Request) -> Response:
    return Response(await replicas.metrics(), media_type=CONTENT_TYPE_LATEST)


async def _sources(models: Models, request: Request) -> Response:
    found = [context.kv_events for _, context in models.loaded if context.kv_events is not None]
    return reply({"object": "list", "data": found})


# fmt: off
OPERATIONS = (
    Operation(
        "/health", OfServer(_health),
        access="public", summary="Report that the process runs.", replicas=Spread("front end", _health),
    ),
    Operation(
        "/ready", OfServer(_ready),
        access="public", summary="Report that the engine takes requests.",
        details="The status is 503 if the engine is closed, or if no replica is ready.",
        replicas=Spread("front end", _front_ready),
    ),
    Operation("/version", OfServer(_version), access="key", summary="Return the version of the server."),
    Operation(
        "/v1/models", OfServer(_models), access="key", summary="List the models and their adapters.",
        details="With several models, each has its `state` (`loaded`, `loading`, `unloaded`, `unloading`), the "
        "`bytes` of its memory, and the `error` of its last failed load.",
    ),
    Operation(
        "/v1/models/{name:path}", OfServer(_model),
        access="key", summary="Describe one model or adapter.",
        details="The name is one that requests may give as `model`. The status is 404 for any other name.",
    ),
    Operation(
        "/metrics", OfServer(_metrics),
        access="key", summary="Return the metrics of the server for Prometheus.",
        replicas=Spread("all", _front_metrics), media_types=("text/plain",),
    ),
    Operation(
        "/kv_event_sources", OfServer(_sources),
        access="key", summary="List where the cache's events are published.", replicas=ALL_LISTED,
    ),
)
