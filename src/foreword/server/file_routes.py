"""OpenAI's operations on files, which are the input and the output of batches."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from foreword.fields import Fields, Kind, one_of
from foreword.server.errors import HttpError
from foreword.server.failures import NOT_FOUND, NOT_STORED, STORAGE_FULL
from foreword.server.lists import check_query, listing, page_of
from foreword.server.operation import Body, Operation, of_shared
from foreword.server.reply import reply
from foreword.server.shared import Shared
from foreword.server.store import Store, new_id

FILE = "file"
MOST_FILES = 10_000  # files of one owner
BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of files."""
_CONTENT = Kind("a file", lambda value: isinstance(value, bytes), {"type": "string", "format": "binary"})


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a client sends."""

    data: bytes


def parse_upload(body: object) -> Upload:
    """Return the file in a form. Raise RequestError for another purpose than batches."""
    fields = Fields(body)
    fields.require("purpose", one_of(BATCH))
    data: bytes = fields.require("file", _CONTENT)
    fields.end()
    return Upload(data)


UPLOAD = Body(parse_upload, {"purpose": BATCH, "file": b"{}"}, form=frozenset())


def durable(shared: Shared) -> Store:
    """Return the store of files and batches. Raise HttpError 400 without a directory for it."""
    if shared.store.directory is None:
        reason = "this server has no directory for files and batches. Start it with --data-directory DIR"
        raise HttpError(NOT_STORED, reason)
    return shared.store


def owner_of(request: Request) -> str:
    """Return who owns what a request stores: its key, or, without keys, everybody."""
    key: str = request.scope["requester"].key
    return key


def add_file(
    store: Store, owner: str, filename: str, purpose: str, data: bytes, *, file_id: str | None = None
) -> dict[str, Any]:
    """Keep a file, and return its description. file_id: of the file, which it replaces if there is one; None: a new
    one. Raise HttpError 400 if there is no room.
    """
    if store.count(FILE, owner) >= MOST_FILES:
        raise HttpError(STORAGE_FULL, f"there are {MOST_FILES} files. Delete some")
    file_id = new_id("file") if file_id is None else file_id
    body = {
        "id": file_id,
        "object": "file",
        "bytes": len(data),
        "created_at": int(time.time()),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }
    path = store.path("files", file_id)
    store.write(path, data)
    try:
        store.add(FILE, owner, file_id, body, size=len(data))
    except BaseException:
        with suppress(HttpError):
            store.remove(path)
        raise
    return body


async def _upload(shared: Shared, request: Request) -> Response:
    upload = await UPLOAD.read(request)
    store = durable(shared)
    name = str(request.scope.get("filename") or "file")[:255]
    return reply(await asyncio.to_thread(add_file, store, owner_of(request), name, BATCH, upload.data))


async def _files(shared: Shared, request: Request) -> Response:
    store, page = durable(shared), page_of(request, limit=10_000, also=("purpose",))
    fields = {name: value for name, value in request.query_params.items() if name == "purpose"}
    return reply(listing(*await asyncio.to_thread(store.listed, FILE, owner_of(request), page, fields=fields)))


async def _file(shared: Shared, request: Request) -> Response:
    check_query(request)
    return reply(await asyncio.to_thread(durable(shared).get, FILE, owner_of(request), request.path_params["id"]))


async def _content(shared: Shared, request: Request) -> Response:
    check_query(request)
    store, file_id = durable(shared), request.path_params["id"]
    await asyncio.to_thread(store.get, FILE, owner_of(request), file_id)
    path = store.path("files", file_id)
    await asyncio.to_thread(_check_content, store, path)
    return FileResponse(path, media_type="application/octet-stream", filename=file_id)


def _check_content(store: Store, path: Path) -> None:
    """Raise HttpError 404 for a content that is not there, 503 for one that cannot be read."""
    with store.http_errors():
        if not path.is_file():
            raise HttpError(NOT_FOUND, f"file {path.name!r:.80}: its content is lost")
        path.open("rb").close()


async def _delete(shared: Shared, request: Request) -> Response:
    check_query(request)
    store, file_id = durable(shared), request.path_params["id"]
    await asyncio.to_thread(store.delete, FILE, owner_of(request), file_id)
    await asyncio.to_thread(store.remove, store.path("files", file_id))
    return reply({"id": file_id, "object": "file", "deleted": True})


# fmt: off
OPERATIONS = (
    Operation(
        "/v1/files", of_shared(_upload), UPLOAD,
        access="key", summary="Store a file for a batch (OpenAI Files).",
        details="`purpose` must be `batch`. Files need the setting `data_directory`. Only the key that sent a file "
        "can use it.",
    ),
    Operation("/v1/files", of_shared(_files), access="key", summary="List the files of the key."),
    Operation("/v1/files/{id}", of_shared(_file), access="key", summary="Describe a file."),
    Operation(
        "/v1/files/{id}/content", of_shared(_content), access="key", summary="Return the content of a file.",
        media_types=("application/octet-stream",),
    ),
    Operation("/v1/files/{id}", of_shared(_delete), access="key", summary="Delete a file.", given_method="DELETE"),
)
