"""The server as an ASGI application."""

from __future__ import annotations

from collections import Counter

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.errors import not_found
from foreword.server.gate import Gate
from foreword.server.operation import Operation
from foreword.server.operations import OPERATIONS


def make_app(context: Context) -> ASGIApp:
    """All operations, behind keys and limits. The engine stays its owner's: the application does not close it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation = scope["operation"]
        if not operation.is_served(context):
            raise not_found(scope["method"], scope["path"])
        response = await operation.handler(context, Request(scope, receive))
        await response(scope, receive, send)

    return behind_gate(answer, context.config, context.metrics.responses)


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
