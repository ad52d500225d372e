"""OpenAI's operations on responses, stored ones among them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from foreword.engine import RequestOutput
from foreword.openai import ResponsesRequest, ResponseStream, parse_responses, response_body
from foreword.openai.frames import EVENTS
from foreword.openai.response import Body as Values
from foreword.openai.response import Named, num_values
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.file_routes import owner_of
from foreword.server.lists import check_query, page_of, paged
from foreword.server.operation import JSON, Body, Operation, of_shared
from foreword.server.reply import reply
from foreword.server.responses import chosen
from foreword.server.shared import Shared


async def _known(context: Context, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the conversation was before, and where the response is kept."""
    responses, owner, (store, previous) = context.responses, owner_of(request), chosen(body)
    earlier: list[Values] = []
    if previous is not None:
        responses.check_open("previous_response_id")
        earlier = await asyncio.to_thread(responses.conversation, owner, previous)
    if store:
        responses.check_open("store")
    return {"earlier": earlier, "stores": responses.is_open, "keep": partial(responses.keep, owner)}


def _own_id(named: Named) -> Named:
    """Return the values with another id: clients choose that of a request, and may do so twice."""
    return {**named, "response_id": uuid4().hex}


def _whole(wanted: ResponsesRequest, output: RequestOutput, named: Named) -> Response:
    body = response_body(wanted, output, **_own_id(named))
    wanted.stored(body)
    return reply(body)


RESPONSES: Api[ResponsesRequest, RequestOutput] = Api(
    body=Body(parse_responses, {"input": "Hello", "max_output_tokens": 16}, timeout=True, samples=True),
    run=lambda generation, wanted: generation.chat(wanted.chat),
    whole=lambda context, wanted, outputs, named: _whole(wanted, outputs[0], named),
    size=num_values,
    waits=lambda wanted: bool(wanted.echo["store"]),
    stream=lambda context, wanted, named: ResponseStream(wanted, **_own_id(named)) if wanted.chat.stream else None,
    known=_known,
)


async def _response(shared: Shared, request: Request) -> Response:
    check_query(request)
    found, _ = await asyncio.to_thread(shared.responses.get, owner_of(request), request.path_params["id"])
    return reply(found)


async def _items(shared: Shared, request: Request) -> Response:
    page = page_of(request)
    _, items = await asyncio.to_thread(shared.responses.get, owner_of(request), request.path_params["id"])
    return reply(paged(items, page))


async def _delete(shared: Shared, request: Request) -> Response:
    check_query(request)
    response_id = request.path_params["id"]
    await asyncio.to_thread(shared.responses.delete, owner_of(request), response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


# fmt: off
OPERATIONS = (
    Operation(
        "/v1/responses", RESPONSES, RESPONSES.body,
        access="key", summary="Answer a conversation, and store the response (OpenAI Responses).",
        details="`input` is a text or a list of items. It follows the items of `previous_response_id` and of the "
        "responses before that one. Function tools, `text.format` and reasoning items are supported. With `store: "
        "false` nothing is stored.",
        media_types=(JSON, EVENTS),
    ),
    Operation("/v1/responses/{id}", of_shared(_response), access="key", summary="Return a stored response of this "
    "key."),
    Operation(
        "/v1/responses/{id}", of_shared(_delete), given_method="DELETE",
        access="key", summary="Delete a stored response.",
    ),
    Operation(
        "/v1/responses/{id}/input_items", of_shared(_items),
        access="key", summary="List the input of a stored response.",
    ),
)
