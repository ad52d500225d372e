"""OpenAI's operations on batches, which `Batches` answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.fields import OBJECT, STRING, Fields, one_of
from foreword.openai.batch_file import URLS
from foreword.server.batches import BATCH, CANCELLING, RUNNING, UNFINISHED, WAITING
from foreword.server.errors import HttpError
from foreword.server.failures import STORAGE_FULL
from foreword.server.file_routes import FILE, durable, owner_of
from foreword.server.lists import check_query, listing, page_of
from foreword.server.operation import Body, Operation, of_shared
from foreword.server.reply import reply
from foreword.server.shared import Shared
from foreword.server.store import Store, new_id

MOST_UNFINISHED = 100  # batches of one owner
WINDOWS = {"24h": 24 * 3600}
"""Time that a batch may take → seconds."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    window: str
    metadata: dict[str, Any] | None


def parse_batch(body: object) -> BatchRequest:
    """Return the batch in a body. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    request = BatchRequest(
        fields.require("input_file_id", STRING),
        fields.require("endpoint", one_of(*URLS)),
        fields.require("completion_window", one_of(*WINDOWS)),
        fields.take("metadata", OBJECT),
    )
    fields.end({"output_expires_after": ()})
    return request


def parse_nothing(body: object) -> None:
    """Raise RequestError for a body with a field."""
    Fields(body).end()


CREATE = Body(parse_batch, {"input_file_id": "file-0", "endpoint": URLS[0], "completion_window": "24h", "metadata": {}})
CANCEL = Body(parse_nothing, {})


async def _create(shared: Shared, request: Request) -> Response:
    wanted = await CREATE.read(request)
    store, owner = durable(shared), owner_of(request)
    await asyncio.to_thread(store.get, FILE, owner, wanted.input_file_id)
    if await asyncio.to_thread(store.count, BATCH, owner, UNFINISHED) >= MOST_UNFINISHED:
        raise HttpError(STORAGE_FULL, f"{MOST_UNFINISHED} batches are not finished. Wait for some, or cancel them")
    now = int(time.time())
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": wanted.endpoint,
        "errors": None,
        "input_file_id": wanted.input_file_id,
        "completion_window": wanted.window,
        "status": WAITING,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOWS[wanted.window],
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": wanted.metadata,
        **{f"{name}_at": None for name in moments},
    }
    await asyncio.to_thread(_add, store, owner, batch)
    return reply(batch)


def _add(store: Store, owner: str, batch: dict[str, Any]) -> None:
    store.add(BATCH, owner, batch["id"], batch, state=WAITING)


async def _batches(shared: Shared, request: Request) -> Response:
    store, page = durable(shared), page_of(request)
    return reply(listing(*await asyncio.to_thread(store.listed, BATCH, owner_of(request), page)))


async def _batch(shared: Shared, request: Request) -> Response:
    check_query(request)
    return reply(await asyncio.to_thread(durable(shared).get, BATCH, owner_of(request), request.path_params["id"]))


async def _cancel(shared: Shared, request: Request) -> Response:
    await CANCEL.read(request)
    store, owner, batch_id = durable(shared), owner_of(request), request.path_params["id"]
    await asyncio.to_thread(store.get, BATCH, owner, batch_id)
    now = int(time.time())

    def cancel() -> dict[str, Any]:
        ended = {"status": "cancelled", "cancelling_at": now, "cancelled_at": now}
        if not store.change(batch_id, ended, state="cancelled", instead_of=(WAITING,)):
            changes = {"status": CANCELLING, "cancelling_at": now}
            store.change(batch_id, changes, state=CANCELLING, instead_of=(RUNNING,))
        return store.get(BATCH, owner, batch_id)

    return reply(await asyncio.to_thread(cancel))


# fmt: off
OPERATIONS = (
    Operation(
        "/v1/batches", of_shared(_create), CREATE,
        access="key", summary="Answer the lines of a file when no client waits for other requests (OpenAI Batches).",
        details="Lines have the format of `foreword batch` and the same `endpoint`. A batch continues after a "
        "restart.",
    ),
    Operation("/v1/batches", of_shared(_batches), access="key", summary="List the batches of the key."),
    Operation(
        "/v1/batches/{id}", of_shared(_batch), access="key", summary="Describe a batch: its status, and its files.",
    ),
    Operation(
        "/v1/batches/{id}/cancel", of_shared(_cancel), CANCEL,
        access="key", summary="Cancel a batch. The results so far are kept.",
    ),
)
