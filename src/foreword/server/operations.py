"""All operations of the server, and the one that describes them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from foreword.server import (
    adapter_routes,
    audio_routes,
    batch_routes,
    file_routes,
    infill_routes,
    inspect_routes,
    message_routes,
    ollama_routes,
    openai_routes,
    page,
    pooling_routes,
    requests,
    response_routes,
    slot_routes,
    status,
    tokens,
)
from foreword.server.access import Keys
from foreword.server.context import Context
from foreword.server.models import Models
from foreword.server.openapi import description
from foreword.server.operation import OfServer, Operation, Operations
from foreword.server.reply import reply


async def _describe(models: Models, request: Request) -> Response:
    operations = OPERATIONS if models.single is None else served_by(models.single)
    return reply(description(operations, Keys(models.config)))


OPERATIONS = Operations(
    openai_routes.OPERATIONS,
    response_routes.OPERATIONS,
    message_routes.OPERATIONS,
    ollama_routes.OPERATIONS,
    pooling_routes.OPERATIONS,
    audio_routes.OPERATIONS,
    file_routes.OPERATIONS,
    batch_routes.OPERATIONS,
    infill_routes.OPERATIONS,
    tokens.OPERATIONS,
    status.OPERATIONS,
    requests.OPERATIONS,
    slot_routes.OPERATIONS,
    inspect_routes.OPERATIONS,
    adapter_routes.OPERATIONS,
    page.OPERATIONS,
    [
        Operation(
            "/openapi.json",
            OfServer(_describe),
            access="key",
            summary="Describe the operations and their bodies (OpenAPI 3.1).",
        )
    ],
)


def served_by(context: Context) -> list[Operation]:
    """Return the operations that the model of a server can do."""
    return [operation for operation in OPERATIONS if operation.is_served(context)]
