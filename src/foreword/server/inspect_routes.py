"""The page of the engine's last steps, and what it asks for."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID
from foreword.server.operation import JSON, Operation
from foreword.server.page import page_response
from foreword.server.replicas import Replicas, Spread

OF_REPLICAS = (
    "this page shows the steps of one engine, and each replica has its own, behind this address alone. To see those of "
    "replica 0, serve with --record steps.jsonl:200MB and run `foreword inspect steps.0.jsonl -o steps.html` (likewise "
    "for the others). To follow an engine live, serve the model without --replicas, such as at another --port"
)
"""Why a front end has no steps, and how to see those of a replica."""


async def _page(context: Context | Replicas, request: Request) -> Response:
    from foreword.insight.page import live_page  # most servers never show it

    return page_response(await asyncio.to_thread(live_page))


async def _steps(context: Context, request: Request) -> Response:
    return Response(await context.inspector.index(), media_type=JSON)


async def _part(context: Context, request: Request) -> Response:
    given = request.path_params
    epoch = given["epoch"]
    number = int(epoch) if epoch.isascii() and epoch.isdecimal() and len(epoch) < 10 else -1
    return Response(await context.inspector.part(number, given["part"]), media_type=JSON)


async def _refused(replicas: Replicas, request: Request) -> Response:
    raise HttpError(INVALID, OF_REPLICAS)


REFUSED = Spread("refused", _refused)

# fmt: off
OPERATIONS = (
    Operation(
        "/inspect", _page,
        access="public", summary="Show a page of the engine's last steps, which asks for a key.",
        replicas=Spread("front end", _page), media_types=("text/html",),
    ),
    Operation(
        "/inspect/steps", _steps,
        access="admin", summary="List the engine's last steps, with their requests and blocks.",
        details="Token ids and texts are left out unless the server has an `admin_key` that is not an `api_key`.",
        replicas=REFUSED,
    ),
    Operation(
        "/inspect/steps/{epoch}/{part}", _part,
        access="admin", summary="Return the tensors of some steps, or what was written to a block.",
        details="The page takes the names of parts from `/inspect/steps`.", replicas=REFUSED,
    ),
)
