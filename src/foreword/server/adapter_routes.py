"""Operations that load and drop LoRA adapters, with vLLM's bodies."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from foreword.errors import ConfigError, ModelError
from foreword.fields import BOOLEAN, INTEGER, STRING, Fields
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import FORBIDDEN, INVALID, NOT_FOUND
from foreword.server.models import Models
from foreword.server.operation import Body, OfServer, Operation
from foreword.server.replicas import Replicas, Spread, first_found
from foreword.server.reply import json_body, reply


def parse_load(body: object) -> tuple[str, str, bool, str | None]:
    """Return the name, the path, whether it may replace another one, and the name of its model."""
    fields = Fields(body)
    found = fields.require("lora_name", STRING), fields.require("lora_path", STRING)
    replaces: bool = fields.take("load_inplace", BOOLEAN, False)
    model: str | None = fields.take("model", STRING)
    fields.end()
    return *found, replaces, model


def parse_unload(body: object) -> str:
    """Return the name. vLLM's ``lora_int_id`` is read and has no effect."""
    fields = Fields(body)
    name: str = fields.require("lora_name", STRING)
    fields.take("lora_int_id", INTEGER)
    fields.end()
    return name


def _allowed(directory: str | None, given: str) -> Path:
    """Return the path of an adapter below the directory, after symbolic links. Raise HttpError 403 for any other."""
    if directory is None:
        raise HttpError(FORBIDDEN, "adapters cannot be loaded: start the server with --adapter-directory")
    try:
        allowed = Path(directory).resolve()
        path = (allowed / given).resolve()
        if path.is_relative_to(allowed):
            return path
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, links in a circle
        pass
    reason = f"lora_path = {given!r:.80}: is not below the directory that adapters may be loaded from"
    raise HttpError(FORBIDDEN, reason, param="lora_path")


LOAD_BODY = Body(parse_load, {"lora_name": "law", "lora_path": "law"})
UNLOAD_BODY = Body(parse_unload, {"lora_name": "law"})


async def _load(models: Models, request: Request) -> Response:
    operation: Operation = request.scope["operation"]
    context = await operation.context(models, request)
    engine = context.engine
    name, path, replaces, model = await LOAD_BODY.read(request)
    context.check_model(model)
    with models.naming(name):
        owner = models.owner(name)
        if owner is not None and owner.context is not context:
            reason = f"is a name of the model {owner.name!r:.80} or of its adapter. Use another"
            raise HttpError(INVALID, f"lora_name = {name!r:.80}: {reason}", param="lora_name")
        if not name or {name, name.removesuffix(":latest")} & {*context.names}:
            raise HttpError(INVALID, f"lora_name = {name!r:.80}: is not free for an adapter", param="lora_name")
        if name in engine.loras and not replaces:
            reason = f"lora_name = {name!r:.80}: is loaded already. Use load_inplace: true to replace it"
            raise HttpError(INVALID, reason, param="lora_name")
        try:
            await engine.load_lora(name, _allowed(context.config.adapter_directory, path))
        except (ConfigError, ModelError) as error:
            raise HttpError(INVALID, str(error), param="lora_path") from None
    return reply({"lora_name": name, "loaded": True})


async def _load_everywhere(replicas: Replicas, request: Request) -> Response:
    """Load an adapter on all replicas, or on none."""
    body = await json_body(request)
    found = await replicas.answers(request, body)
    failed = next((known for known in found if known[1] != 200), None)
    name = body.get("lora_name")
    if failed is None:
        await replicas.keep_adapter(str(name), {**body, "load_inplace": True})
        return reply(found[0][2])
    if isinstance(name, str) and name not in await replicas.adapters():
        await replicas.call_all(UNLOAD.method, UNLOAD.path, {"lora_name": name})  # from those that have it
    replica, status, answer = failed
    if len({each[1] for each in found}) > 1:
        answer["error"]["message"] = f"replica {replica}: {answer['error']['message']}"
    return reply(answer, status)


async def _unload(context: Context, request: Request) -> Response:
    name = await UNLOAD_BODY.read(request)
    if name not in context.engine.loras:
        raise HttpError(NOT_FOUND, f"lora_name = {name!r:.80}: is not loaded", param="lora_name")
    try:
        await context.engine.drop_lora(name)
    except ConfigError as error:  # another request has dropped it meanwhile
        raise HttpError(NOT_FOUND, f"lora_name = {name!r:.80}: {error}", param="lora_name") from None
    return reply({"lora_name": name, "unloaded": True})


async def _unload_everywhere(replicas: Replicas, request: Request) -> Response:
    """Drop an adapter, also if no replica is ready."""
    body = await json_body(request)
    await replicas.keep_adapter(str(body.get("lora_name")), None)
    return reply(*first_found(await replicas.answers(request, body)))


# fmt: off
LOAD = Operation(
    "/v1/load_lora_adapter", OfServer(_load), LOAD_BODY,
    access="admin", summary="Load a LoRA adapter, which requests can then give as their model (vLLM).",
    details="Other requests continue while it is loaded. `load_inplace: true` replaces an adapter. Either all "
    "replicas load it or none. With several models, `model` names the model that it belongs to.",
    replicas=Spread("all", _load_everywhere), replica_seconds=300.0,  # it is read from a disk
)
UNLOAD = Operation(
    "/v1/unload_lora_adapter", _unload, UNLOAD_BODY, model_field="lora_name",
    access="admin", summary="Unload a LoRA adapter (vLLM).", details="Requests in progress continue with it until "
    "they end.",
    replicas=Spread("all", _unload_everywhere),
)
OPERATIONS = (LOAD, UNLOAD)
