"""The page of the engine's last steps, and what it asks for."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID, NOT_FOUND, NOT_READY
from foreword.server.models import Models
from foreword.server.operation import JSON, OfServer, Operation
from foreword.server.page import page_response
from foreword.server.replicas import Replicas, Spread

REPLICA = "replica"
"""The parameter of a query that names one."""
FOLLOW_SECONDS = 10.0
"""That a replica has to replay its last steps for the first answer."""


async def _page(server: Models | Replicas, request: Request) -> Response:
    from foreword.insight.page import live_page  # most servers never show it

    return page_response(await asyncio.to_thread(live_page))


async def _steps(context: Context, request: Request) -> Response:
    _check_one(request)
    return Response(await context.inspector.index(), media_type=JSON)


async def _part(context: Context, request: Request) -> Response:
    _check_one(request)
    given = request.path_params
    epoch = given["epoch"]
    number = int(epoch) if epoch.isascii() and epoch.isdecimal() and len(epoch) < 10 else -1
    return Response(await context.inspector.part(number, given["part"]), media_type=JSON)


def _check_one(request: Request) -> None:
    """Raise HttpError if a request names a replica, but the server has no replicas."""
    if (name := request.query_params.get(REPLICA)) is not None:
        raise HttpError(INVALID, f"{REPLICA}={name!r:.80}: this server has one engine; leave it out", param=REPLICA)


async def _of_one(replicas: Replicas, request: Request) -> Response:
    ready = [str(state["replica"]) for state in await replicas.states() if state["ready"]]
    if not ready:
        raise HttpError(NOT_READY, "no replica is ready", headers={"Retry-After": "1"})
    name, names = request.query_params.get(REPLICA), ", ".join(ready)
    if name is None:
        raise HttpError(
            INVALID,
            f"{REPLICA}: name the one whose steps you want, as in ?replica={ready[0]}; ready are {names}",
            param=REPLICA,
        )
    path, seconds = request.scope["path"], request.scope["operation"].replica_seconds
    found = await replicas.fetch_of(name, path, seconds=seconds) if name in ready else None
    if found is None:
        raise HttpError(
            NOT_FOUND, f"{REPLICA}={name!r:.80}: does not answer, or there is none; ready are {names}", param=REPLICA
        )
    status, content = found
    return Response(content, status, media_type=JSON)


NAMED = Spread("named", _of_one)

# fmt: off
OPERATIONS = (
    Operation(
        "/inspect", OfServer(_page),
        access="public", summary="Show a page of the engine's last steps, which asks for a key.",
        replicas=Spread("front end", _page), media_types=("text/html",),
    ),
    Operation(
        "/inspect/steps", _steps,
        access="admin", summary="List the engine's last steps, with their requests and blocks.",
        details="Token ids and texts are left out unless the server has an `admin_key` that is not also an "
        "`api_key`. With replicas they are always left out, and the query selects a replica: `?replica=0`.",
        replicas=NAMED, replica_seconds=FOLLOW_SECONDS,
    ),
    Operation(
        "/inspect/steps/{epoch}/{part}", _part,
        access="admin", summary="Return the tensors of some steps, or what was written to a block.",
        details="The page takes the names of parts from `/inspect/steps`.",
        replicas=NAMED, replica_seconds=FOLLOW_SECONDS,
    ),
)
