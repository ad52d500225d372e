"""The server as an ASGI application."""

from __future__ import annotations

from collections import Counter

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.gate import Gate
from foreword.server.models import Models
from foreword.server.operation import OfServer, Operation
from foreword.server.operations import OPERATIONS


def make_app(served: Context | Models) -> ASGIApp:
    """Return all operations, behind keys and limits. The engines stay their owner's: the application does not close
    them.
    """
    models = Models.of(served) if isinstance(served, Context) else served

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation = scope["operation"]
        request, handler = Request(scope, receive), operation.handler
        if isinstance(handler, OfServer):
            response = await handler.answer(models, request)
        else:
            response = await handler(await operation.context(models, request), request)
        await response(scope, receive, send)

    return behind_gate(answer, models.config, models.responses)


def behind_gate(app: ASGIApp, config: ServerConfig, responses: Counter[int]) -> ASGIApp:
    """Put an application that answers operations behind keys and limits; web pages of other origins may call it if the
    settings name some. responses: counts the requests by the status of their response.
    """
    gate = Gate(app, OPERATIONS, config, responses)
    if not config.cors_origin:
        return gate
    return CORSMiddleware(
        gate, config.cors_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
    )
