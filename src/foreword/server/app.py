"""The server as an ASGI application."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from foreword.server import (
    adapter_routes,
    audio_routes,
    kv_event_routes,
    message_routes,
    openai_routes,
    page,
    pooling_routes,
    requests,
    status,
    tokens,
)
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.gate import Gate
from foreword.server.openapi import Operation, route_of

MODULES = (
    status,
    openai_routes,
    message_routes,
    pooling_routes,
    audio_routes,
    tokens,
    requests,
    adapter_routes,
    kv_event_routes,
    page,
)
"""Modules with a function ``routes_of(context)``."""


def routes_of(context: Context) -> list[Operation]:
    """All routes of the server."""
    routes = [route for module in MODULES for route in module.routes_of(context)]
    return [*routes, route_of(routes, context.config)]


def make_app(context: Context) -> ASGIApp:
    """All routes, behind keys and limits. The engine stays its owner's: the application does not close it."""
    router = Router(routes_of(context), redirect_slashes=False)
    return with_origins(Gate(router, context.config, context.metrics.responses), context.config)


def with_origins(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """The application for web pages of other origins too, if the settings name some."""
    if not config.cors_origin:
        return app
    return CORSMiddleware(
        app, config.cors_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
    )
