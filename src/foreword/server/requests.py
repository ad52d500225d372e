"""Operations about the requests in the engine: what they do, why they wait, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.cache import MEANING, CacheMiss
from foreword.fields import STRING, Fields
from foreword.scheduler import Reason
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID, NOT_FOUND
from foreword.server.models import ModelEntry, Models
from foreword.server.operation import Body, OfServer, Operation
from foreword.server.replicas import ALL_LISTED, FIRST, Called, merged
from foreword.server.reply import reply


def parse_abort(body: object) -> str:
    """Return the id in a body of /abort."""
    fields = Fields(body)
    name: str = fields.require("request_id", STRING)
    fields.end()
    return name


def parse_reset(body: object) -> None:
    """Raise RequestError for a body of /reset_prefix_cache with a field."""
    Fields(body).end()


ABORT = Body(parse_abort, {"request_id": "id"})
RESET = Body(parse_reset, {})


async def _requests(models: Models, request: Request) -> Response:
    shown = models.config.shows_texts
    data = [_waiting(name, entry) for name, entry in models.waiting.items()]
    for entry, context in models.loaded:
        states = await _states(context, context.engine.request_ids, prompt=shown, cached=shown)
        preparing = sorted(name for name, progress in context.progress.items() if not progress.names)
        found = [*map(_in_preparation, preparing), *states]
        data += found if models.single is not None else [{**one, "model": entry.name} for one in found]
    return reply({"object": "list", "data": data})


async def _why(models: Models, request: Request) -> Response:
    name = request.path_params["id"]
    if (entry := models.waiting.get(name)) is not None:
        return reply(_waiting(name, entry))
    context, names = _in_engines(models, name)
    if not names:
        return reply(_in_preparation(name))
    progress, client = context.progress.get(name), request.scope["requester"]
    is_own = progress is not None and progress.client.is_same(client)
    states = await _states(context, names, others=False, prompt=is_own)
    return reply(states[0] if names == [name] else {"id": name, "state": states[0]["state"], "parts": states})


async def _abort(models: Models, request: Request) -> Response:
    name = await ABORT.read(request)
    if (entry := models.waiting.get(name)) is not None:
        reason = f"waits for its model {entry.name!r:.80}, which is {entry.state}"
        fix = "Abort it later, or close its connection"
        raise HttpError(INVALID, f"request {name!r:.80}: {reason}. {fix}", param="request_id")
    context, names = _in_engines(models, name)
    for part in names:
        context.engine.abort(part)
    if name in context.progress:
        context.progress[name].is_aborted = True
    return reply({"request_id": name, "aborted": True})


async def _reset(models: Models, request: Request) -> Response:
    await RESET.read(request)
    found = [await context.engine.call(context.engine.engine.reset_prefix_cache) for _, context in models.loaded]
    return reply({"reset": all(found)})


def _all_reset(found: Called) -> tuple[Any, int]:
    """Return whether all replicas have reset their caches, or the first refusal."""
    refused = next((answer for _, status, answer in found if status != 200), None)
    return ({"reset": all(answer["reset"] for *_, answer in found)}, 200) if refused is None else (refused, 400)


def _in_engines(models: Models, name: str) -> tuple[Context, list[str]]:
    """Return the requests of an id, with the model whose engine has them: the request that has the id, or those of the
    HTTP request that has it; none while they are prepared. Raise HttpError 404 if there are none.
    """
    for _, context in models.loaded:
        running = context.engine.request_ids
        progress = context.progress.get(name)
        names = [part for part in ((name,) if progress is None else progress.names) if part in running]
        if names or (progress is not None and not progress.names):
            return context, names
    raise HttpError(NOT_FOUND, f"request {name!r:.80}: is not in the engine, or has ended", param="request_id")


async def _states(
    context: Context, names: Sequence[str], *, others: bool = True, prompt: bool = False, cached: bool = False
) -> list[dict[str, Any]]:
    """Return why each request waits, and why no more of its prompt was in the cache. others: with the name of a request
    that it waits for. prompt: with the text of its prompt. cached: with the text that it parts from, and whether that
    is under another salt.
    """
    engine = context.engine.engine

    def state(name: str) -> dict[str, Any]:
        reason = engine.why(name)
        code = "new" if reason.code == "unknown" else reason.code
        details = {key: value for key, value in reason.details if others or key != "request"}
        miss = engine.cache_miss(name)
        cache = {}
        if miss is not None:
            known = miss if cached else miss.public()
            texts = {"prompt": known.ours if prompt else (), "cached": known.theirs if cached else ()}
            loaded = {"loaded": found} if (found := dict(engine.loaded_tokens(name))) else {}
            cache = {
                "cache": _cache(known) | loaded | {key: decode(list(ids), False) for key, ids in texts.items() if ids}
            }
        return {"id": name, "state": code, "why": str(Reason(code, tuple(details.items()))), **details, **cache}

    decode = context.tokenizer.decode
    return await context.engine.call(lambda: [state(name) for name in names])


def _cache(miss: CacheMiss) -> dict[str, Any]:
    """Return what the cache had of a prompt, and why not more."""
    return {
        "reused": miss.num_reused,
        "prompt_tokens": miss.num_tokens,
        "reason": miss.reason,
        "meaning": MEANING[miss.reason],
        "position": miss.position,
    }


def _in_preparation(name: str) -> dict[str, Any]:
    return {"id": name, "state": "preparing", "why": "preparing"}


def _waiting(name: str, entry: ModelEntry) -> dict[str, Any]:
    """Return why a request waits whose model is not loaded yet."""
    return {"id": name, "state": "model", "why": f"its model is {entry.state}", "model": entry.name}


# fmt: off
OPERATIONS = (
    Operation(
        "/requests", OfServer(_requests),
        access="admin", summary="List the requests in the engine, and why each waits.",
        details="The texts of prompts, and of cached content from which they differ, are left out unless the server "
        "has an `admin_key` that is not also an `api_key`. With replicas they are always left out.",
        replicas=ALL_LISTED,
    ),
    Operation(
        "/requests/{id}/why", OfServer(_why),
        access="key", summary="Explain why a request waits, and why not all of its prompt was in the cache.",
        details="The id is the header `X-Request-Id` of the response, which the client may choose. For a request of "
        "several prompts, `parts` has each of them. `cache` has the number of reused tokens, how many of these were "
        "`loaded` from disk or memory, and the reason and the position at which the reuse ended. The client that "
        "sent the request also gets the prompt's text from that position on. The cached text may come from another "
        "client, so only `/requests` shows it.",
        replicas=FIRST,
    ),
    Operation(
        "/abort", OfServer(_abort), ABORT,
        access="admin", summary="End a request with its tokens so far.",
        details='A request that is still being prepared can be ended, too. Its `finish_reason` is `"abort"`.',
        replicas=FIRST,
    ),
    Operation(
        "/reset_prefix_cache", OfServer(_reset), RESET,
        access="admin", summary="Clear the prefix cache, if no request runs.", replicas=merged("all", _all_reset),
    ),
)
