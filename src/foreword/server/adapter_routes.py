"""Routes that load and drop LoRA adapters, with vLLM's bodies: /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from foreword.errors import ModelError
from foreword.fields import BOOLEAN, INTEGER, STRING, Fields
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.openapi import Body, Operation
from foreword.server.reply import json_body, reply


def routes_of(context: Context) -> list[Operation]:
    """/v1/load_lora_adapter, /v1/unload_lora_adapter."""
    engine = context.engine

    async def load(request: Request) -> Response:
        """Load a LoRA adapter, which is a model of requests then."""
        name, path, replaces = parse_load(await json_body(request))
        if not name or name in context.names:
            raise HttpError(400, f"lora_name = {name!r:.80}: is not free for an adapter", param="lora_name")
        if name in engine.loras and not replaces:
            reason = f"lora_name = {name!r:.80}: is loaded already. Use load_inplace: true to replace it"
            raise HttpError(400, reason, param="lora_name")
        try:
            await engine.load_lora(name, _allowed(context.config.adapter_directory, path))
        except ModelError as error:
            raise HttpError(400, str(error), param="lora_path") from None
        return reply({"lora_name": name, "loaded": True})

    async def unload(request: Request) -> Response:
        """Drop a LoRA adapter; requests in progress end with it."""
        name = parse_unload(await json_body(request))
        if name not in engine.loras:
            raise HttpError(404, f"lora_name = {name!r:.80}: is not loaded", param="lora_name")
        await engine.drop_lora(name)
        return reply({"lora_name": name, "unloaded": True})

    return [
        Operation("/v1/load_lora_adapter", load, Body(parse_load, {"lora_name": "law", "lora_path": "law"})),
        Operation("/v1/unload_lora_adapter", unload, Body(parse_unload, {"lora_name": "law"})),
    ]


def parse_load(body: object) -> tuple[str, str, bool]:
    """Name, path, and whether it may replace another one."""
    given = Fields(body)
    found = given.require("lora_name", STRING), given.require("lora_path", STRING)
    replaces: bool = given.take("load_inplace", BOOLEAN, False)
    given.end()
    return *found, replaces


def parse_unload(body: object) -> str:
    """The name. vLLM's ``lora_int_id`` is read and has no effect."""
    given = Fields(body)
    name: str = given.require("lora_name", STRING)
    given.take("lora_int_id", INTEGER)
    given.end()
    return name


def _allowed(directory: str | None, given: str) -> Path:
    """The path of an adapter below the directory, after symbolic links. HttpError 403 for any other."""
    if directory is None:
        raise HttpError(403, "adapters cannot be loaded: start the server with --adapter-directory", code="forbidden")
    try:
        allowed = Path(directory).resolve()
        path = (allowed / given).resolve()
        if path.is_relative_to(allowed):
            return path
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, links in a circle
        pass
    reason = f"lora_path = {given!r:.80}: is not below the directory that adapters may be loaded from"
    raise HttpError(403, reason, param="lora_path", code="forbidden")
