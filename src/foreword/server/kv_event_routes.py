"""The route that tells where the cache's events are published."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.context import Context
from foreword.server.openapi import Operation
from foreword.server.reply import reply


def routes_of(context: Context) -> list[Operation]:
    """/kv_event_sources."""

    async def sources(request: Request) -> Response:
        """Where the cache's events are published."""
        return reply({"object": "list", "data": [] if context.kv_events is None else [context.kv_events]})

    return [Operation("/kv_event_sources", sources)]
