"""Ollama's operations: chats, prompts and embeddings; the models of the server; downloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.engine import RequestOutput
from foreword.engine.pooling import PoolingRequestOutput
from foreword.errors import ContextLengthError
from foreword.models import registry
from foreword.models.hub import from_hub
from foreword.models.ollama_names import from_ollama
from foreword.ollama import (
    EmbedRequest,
    GenerateRequest,
    LineStream,
    answer_body,
    check_num_ctx,
    embed_body,
    embeddings_body,
    keep_alive_of,
    line,
    parse_chat,
    parse_embed,
    parse_embeddings,
    parse_generate,
    parse_model,
    state_body,
    too_long,
)
from foreword.openai.frames import LINES
from foreword.openai.response import num_values
from foreword.server.about import NO_FILES, about_or_none, files_of
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.errors import OLLAMA, HttpError
from foreword.server.events import EventStream
from foreword.server.failures import INVALID
from foreword.server.generation import Generation
from foreword.server.models import ModelEntry, Models
from foreword.server.openai_routes import completions
from foreword.server.operation import JSON, Body, OfServer, Operation
from foreword.server.pooling_routes import pooled, pools
from foreword.server.replicas import refused
from foreword.server.reply import reply
from foreword.server.time_limit import deadline

PULL_SECONDS = 0.5
"""The time between two lines about a download."""
LONG = timedelta(days=365 * 100)
"""The time until a model that stays loaded is unloaded, for clients that read a time."""

# -- chats, prompts and embeddings -----------------------------------------------------------------------------------


async def _generate(generation: Generation, wanted: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
    context = generation.context
    wanted = _fitted(context, wanted)
    with _bounded(context, wanted.num_ctx):
        if wanted.chat is not None:
            return await generation.chat(wanted.chat)
        assert wanted.completion is not None
        return await completions(generation, wanted.completion)


@contextmanager
def _bounded(context: Context, num_ctx: int | None, *, is_embedded: bool = False) -> Iterator[None]:
    """Check ``num_ctx``; within the block, the error of a prompt for which it has no room names it."""
    longest = context.engine.engine.states.max_model_len
    check_num_ctx(num_ctx, longest)
    try:
        yield
    except ContextLengthError as error:
        if num_ctx is None or num_ctx == longest:
            raise
        raise too_long(num_ctx, error, is_embedded=is_embedded) from None


def _fitted(context: Context, wanted: GenerateRequest) -> GenerateRequest:
    return wanted.fitted(context.tokenizer.has_chat_template)


async def _embed(generation: Generation, wanted: EmbedRequest) -> AsyncGenerator[PoolingRequestOutput, None]:
    with _bounded(generation.context, wanted.num_ctx, is_embedded=True):
        return await pooled(generation, wanted)


def _api(body: Body[GenerateRequest]) -> Api[GenerateRequest, RequestOutput]:
    return Api(
        body=body,
        run=_generate,
        whole=lambda context, wanted, outputs, named: reply(answer_body(_fitted(context, wanted), outputs[0], **named)),
        size=num_values,
        stream=lambda context, wanted, named: LineStream(_fitted(context, wanted), **named) if wanted.stream else None,
    )


OPTIONS = {"temperature": 0.0, "num_predict": 16}
CHAT = _api(
    Body(
        parse_chat,
        {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "options": OPTIONS},
        timeout=True,
        samples=True,
    )
)
GENERATE = _api(
    Body(parse_generate, {"model": "model", "prompt": "Hello", "options": OPTIONS}, timeout=True, samples=True)
)
EMBED: Api[EmbedRequest, PoolingRequestOutput] = Api(
    body=Body(parse_embed, {"model": "model", "input": ["A man is eating food."]}, timeout=True),
    run=_embed,
    whole=lambda context, wanted, outputs, named: reply(embed_body(wanted, outputs, **named)),
    size=lambda outputs: sum(output.outputs.data.size for output in outputs),
)
EMBEDDINGS: Api[EmbedRequest, PoolingRequestOutput] = Api(
    body=Body(parse_embeddings, {"model": "model", "prompt": "A man is eating food."}, timeout=True),
    run=_embed,
    whole=lambda context, wanted, outputs, named: reply(embeddings_body(wanted, outputs, **named)),
    size=lambda outputs: sum(output.outputs.data.size for output in outputs),
)


async def _answer(models: Models, request: Request, api: Api[Any, Any]) -> Response:
    """Answer with a model that stays loaded as long as the request asks for; without a prompt, only load or unload
    it.
    """
    operation: Operation = request.scope["operation"]
    entry, body = models.find(await operation.model_name(request)), request.scope["fields"]
    deadline(request, body, models.config)
    seconds = keep_alive_of(body)
    wanted = None if _has_prompt(body) else api.body.parse(body)
    if isinstance(wanted, GenerateRequest) and seconds == 0:
        if entry.context is not None:
            check_num_ctx(wanted.num_ctx, entry.context.engine.engine.states.max_model_len)
        models.set_keep_alive(entry, 0)
        return _state(wanted, entry.name, "unload")
    context = await operation.context(models, request)
    if isinstance(wanted, GenerateRequest):
        check_num_ctx(wanted.num_ctx, context.engine.engine.states.max_model_len)
    if seconds is not None and (seconds or not entry.served.pin):  # after a prompt, a pinned model stays
        models.set_keep_alive(entry, seconds)
    if isinstance(wanted, GenerateRequest):
        return _state(wanted, entry.name, "load")
    return await api(context, request)


def _has_prompt(body: dict[str, Any]) -> bool:
    return any(body.get(name) for name in ("messages", "prompt", "suffix", "images", "raw"))


def _state(wanted: GenerateRequest, name: str, reason: str) -> Response:
    body = state_body(wanted, name, reason)
    return Response(line(body), media_type=LINES) if wanted.stream else reply(body)


# -- the models of the server ----------------------------------------------------------------------------------------


async def _tags(models: Models, request: Request) -> Response:
    return reply({"models": await asyncio.to_thread(lambda: [_listed(entry) for entry in models.entries])})


def _listed(entry: ModelEntry) -> dict[str, Any]:
    path = entry.path
    files = NO_FILES if path is None else files_of(path)
    details = {"format": files.format} if entry.about is None else entry.about.details(files)
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": files.modified,
        "size": files.size,
        "digest": files.digest,
        "details": details,
    }


async def _ps(models: Models, request: Request) -> Response:
    found = []
    for entry, context in models.loaded:
        listed = await asyncio.to_thread(_listed, entry)
        left = entry.expires_in
        until = datetime.now(UTC) + (LONG if left is None else timedelta(seconds=min(left, LONG.total_seconds())))
        of_memory = {
            "size": entry.num_bytes or listed["size"],
            "size_vram": 0,
            "expires_at": until.isoformat(),
            "context_length": context.engine.engine.states.max_model_len,
        }
        found.append({name: value for name, value in listed.items() if name != "modified_at"} | of_memory)
    return reply({"models": found})


async def _show(models: Models, request: Request) -> Response:
    entry = models.find((await SHOW.read(request)).model)
    if entry.about is None:
        source = entry.path if entry.path is not None else entry.served.model
        entry.about = await asyncio.to_thread(about_or_none, source)
    listed = await asyncio.to_thread(_listed, entry)
    about = entry.about
    return reply(
        {
            "modelfile": f"FROM {entry.served.model}\n",
            "parameters": _parameters(entry),
            "template": "" if about is None else about.template,
            "details": listed["details"],
            "model_info": {} if about is None else about.info(),
            "capabilities": [] if about is None else list(about.capabilities),
            "modified_at": listed["modified_at"],
        }
    )


def _parameters(entry: ModelEntry) -> str:
    """Return the sampling that the model suggests, a line each, if it is loaded."""
    suggested = {} if entry.context is None else entry.context.engine.engine.suggested
    return "\n".join(f"{name} {value}" for name, value in suggested.items())


async def _version(models: Models, request: Request) -> Response:
    return reply({"version": __version__})


# -- downloads -------------------------------------------------------------------------------------------------------


async def _pull(models: Models, request: Request) -> Response:
    wanted = await PULL.read(request)
    models.check_changes()
    models.check_free(wanted.model)
    lines = _pulled(models, wanted.model)
    if wanted.stream:
        return EventStream(lines, silence=models.config.keep_alive, keep_alive=b"", media_type=LINES)
    async for _ in lines:
        pass
    return reply({"status": "success"})


async def _pulled(models: Models, name: str) -> AsyncGenerator[bytes, None]:
    """Fetch a model, and serve it. Yields lines about its progress. A client that leaves does not end the download."""
    state = [0, 0]

    def progress(here: int, total: int) -> None:
        state[:] = here, total

    yield line({"status": "pulling manifest"})
    task = asyncio.create_task(asyncio.to_thread(_fetch, name, progress))
    while not (await asyncio.wait((task,), timeout=PULL_SECONDS))[0]:
        here, total = state
        so_far = {"digest": name, "total": total, "completed": here} if total else {}
        yield line({"status": f"pulling {name}", **so_far})
    task.result()
    models.add(name)
    yield line({"status": "success"})


def _fetch(name: str, progress: Any) -> None:
    """Fetch a model known by name, by a name of Ollama or by an id of the hub. Raise ModelError for another."""
    known = name.lower().removesuffix(":latest")
    if known in registry.KNOWN:
        registry.pull(known, progress=progress)
        return
    found = from_ollama(name) or name
    if "/" in found:
        from_hub(found)
    else:
        registry.pull(found, progress=progress)


async def _delete(models: Models, request: Request) -> Response:
    """Delete the files of a model that is known by name from Foreword's own cache, and serve it no longer."""
    models.check_changes()
    entry = models.find((await DELETE.read(request)).model)
    if (known := registry.KNOWN.get(entry.served.model.lower())) is None:
        reason = "only models known by name are deleted. Delete the file yourself, or one of the hub with hf cache"
        raise HttpError(INVALID, f"model = {entry.name!r:.80}: {reason}", param="model")
    await models.remove(entry)
    await asyncio.to_thread(registry.remove, known.name)
    return Response(status_code=200)


SHOW, PULL, DELETE = (Body(parse_model, {"model": "model"}) for _ in range(3))
OF_ONE = refused("models are not added or removed where replicas serve one; use `foreword models pull` and `rm`")

# fmt: off
OPERATIONS = (
    Operation(
        "/api/chat", OfServer(partial(_answer, api=CHAT)), CHAT.body,
        access="key", summary="Answer a conversation (Ollama).",
        details="The answer is sent as lines of JSON unless `stream` is false. `options` has sampling parameters, "
        "and `num_ctx`, which limits prompt and answer together, up to the server's `max_model_len`. `format`, "
        "`tools`, `think`, `images` and `keep_alive` are supported. A request without messages loads the model, or "
        "unloads it if `keep_alive` is 0.",
        errors=OLLAMA, media_types=(LINES, JSON),
    ),
    Operation(
        "/api/generate", OfServer(partial(_answer, api=GENERATE)), GENERATE.body,
        access="key", summary="Answer a prompt (Ollama).",
        details="It works like `/api/chat`. With `raw` the prompt is used unchanged. With `suffix` the model fills "
        "the gap before it. `template` and `context` are refused.",
        errors=OLLAMA, media_types=(LINES, JSON),
    ),
    Operation(
        "/api/embed", OfServer(partial(_answer, api=EMBED)), EMBED.body,
        access="key", summary="Embed one or more texts (Ollama).", errors=OLLAMA, is_served=pools,
    ),
    Operation(
        "/api/embeddings", OfServer(partial(_answer, api=EMBEDDINGS)), EMBEDDINGS.body,
        access="key", summary="Embed a text (Ollama's older form).", errors=OLLAMA, is_served=pools,
    ),
    Operation(
        "/api/tags", OfServer(_tags),
        access="key", summary="List the models of the server (Ollama).", errors=OLLAMA,
        details="The `digest` changes with the paths, sizes and times of the files.",
    ),
    Operation(
        "/api/ps", OfServer(_ps),
        access="key", summary="List the loaded models, and the time until which each stays loaded (Ollama).",
        errors=OLLAMA,
    ),
    Operation(
        "/api/show", OfServer(_show), SHOW,
        access="key", summary="Describe a model by the headers of its files (Ollama).", errors=OLLAMA,
    ),
    Operation(
        "/api/version", OfServer(_version),
        access="key", summary="Return the version of the server (Ollama).", errors=OLLAMA,
        details="It is Foreword's version, not Ollama's.",
    ),
    Operation(
        "/api/pull", OfServer(_pull), PULL,
        access="admin", summary="Download a model, and serve it (Ollama).",
        details="The name is one of `foreword models list`, a known name of Ollama's library, or an id of the hub. "
        "The server must have been started with `--load-on-demand`.",
        replicas=OF_ONE, errors=OLLAMA, media_types=(LINES, JSON),
    ),
    Operation(
        "/api/delete", OfServer(_delete), DELETE, given_method="DELETE",
        access="admin", summary="Delete the downloaded files of a model that is known by name (Ollama).",
        details="Files that Foreword has not downloaded into its own cache are never deleted.",
        replicas=OF_ONE, errors=OLLAMA,
    ),
)
