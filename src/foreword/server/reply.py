"""Bodies of requests and responses as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from math import isfinite
from typing import Any, TypeVar

import msgspec
import numpy as np
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.server.bodies import LARGE
from foreword.server.errors import HttpError
from foreword.server.failures import FOREIGN_ORIGIN, INVALID, WRONG_BODY
from foreword.server.pieces import json_pieces

logging.getLogger("python_multipart").addHandler(logging.NullHandler())  # data of clients is not for a log
T = TypeVar("T")
SMALL = 2 << 10  # bytes of a body, below which its prompt is tokenized in the event loop: a thread would take longer
MAX_FIELDS = 64  # fields of a form
MAX_PARTS = 1 << 17  # objects, lists and fields of objects in a body
MAX_STRINGS = 2 * MAX_PARTS  # in a body, names of fields included
PART_SIGNS = (b"{", b"[", b":")
MANY = 4096  # values in a response, from which on it is written in a thread


async def apart(is_long: bool, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, computed in a thread if that takes long."""
    return await asyncio.to_thread(function, *args) if is_long else function(*args)


def is_small(request: Request) -> bool:
    """Return whether its body is below `SMALL`."""
    size: int = request.scope["body_bytes"]
    return size < SMALL


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON value."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


class PiecesReply(Response):
    """A response with a JSON value that may have iterators, as `json_pieces` writes it. The first piece is made at
    once, each later one in a thread when the client has read those before.
    """

    media_type = "application/json"

    def __init__(self, value: dict[str, Any]) -> None:
        self._pieces = json_pieces(value)
        first, self._next = next(self._pieces), next(self._pieces, None)
        super().__init__(first)
        if self._next is not None:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        piece = bytes(self.body)
        while self._next is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece, self._next = self._next, await asyncio.to_thread(next, self._pieces, None)
        await send({"type": "http.response.body", "body": piece})


async def built(num_values: int, make: Callable[..., Response], *args: Any) -> Response:
    """Return ``make(*args)``, a response that has about that many values."""
    return await apart(num_values >= MANY, make, *args)


async def json_body(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request; without a body an empty one. Raise HttpError 400 for anything
    else, 415 if it is sent as such.
    """
    if not request.scope["body_bytes"]:  # the origin of such a request is checked before
        return {}
    # A web page of another origin cannot send this type without being asked about it first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(WRONG_BODY, "send the body as JSON, with the header Content-Type: application/json")
    data = b"".join([piece async for piece in request.stream() if piece])
    value = await in_turn(request.scope, len(data), decoded, data)
    if not isinstance(value, dict):
        raise HttpError(INVALID, 'body: expected a JSON object. Give {"model": "…", …}.', param="body")
    return value


async def in_turn(scope: Scope, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, of a large body in a thread, and after other large ones: see `Bodies`."""
    if num_bytes < LARGE:
        return function(*args)
    async with scope["turn"]:
        return await asyncio.to_thread(function, *args)


def decoded(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raise HttpError 400 for text that is not JSON, is not UTF-8, nests too deeply or
    has too many parts or strings: no other thread runs while they are made.
    """
    given = data if isinstance(data, bytes) else data.encode()
    num_parts, num_strings = counted_parts(given)
    for count, what, most in (
        (num_parts, "objects, lists and fields", MAX_PARTS),
        (num_strings, "strings", MAX_STRINGS),
    ):
        if count > most:
            raise HttpError(INVALID, f"body: has {count} {what}, more than {most}. Send fewer", param="body")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HttpError(INVALID, f"body: is not JSON: {error}", param="body") from None


def counted_parts(text: bytes) -> tuple[int, int]:
    """Return the number of objects, lists and fields of a JSON text, and of its strings, before any is made; upper
    bounds if these are at most `MAX_PARTS` and `MAX_STRINGS`.
    """
    most, most_strings = sum(map(text.count, PART_SIGNS)), text.count(b'"') // 2
    if most <= MAX_PARTS and most_strings <= MAX_STRINGS:
        return most, most_strings
    plain = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_quote = plain == ord('"')
    is_outside = ~np.logical_xor.accumulate(is_quote)  # whether a place is outside of strings
    found = sum(int(np.count_nonzero(is_outside & (plain == ord(sign)))) for sign in PART_SIGNS)
    return found, int(np.count_nonzero(is_quote)) // 2


def _float(text: str) -> float:
    """Return a number of a JSON text. A function of Python: others run between two numbers, of which msgspec itself
    takes up to 14 µs for each.
    """
    value = float(text)
    if not isfinite(value):
        raise ValueError("number out of range")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_float)


async def form_body(request: Request, json_fields: Collection[str]) -> dict[str, Any]:
    """Read a multipart form: texts, the bytes of files, and lists of texts for names that end with ``[]``.

    json_fields: those that are numbers and truth values, as in JSON; any other text is returned unchanged, so that it
    is refused later.
    The name of a file is ``request.scope["filename"]`` then. Raise HttpError 415 for another body, 400 for one that is
    damaged or has a field twice.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise HttpError(WRONG_BODY, "send the body as a form, with the header Content-Type: multipart/form-data")
    data, found = await request.body(), dict[str, Any]()
    items = _form_items(request.headers, data)
    for name, given, filename in await (asyncio.to_thread(asyncio.run, items) if len(data) >= LARGE else items):
        if filename is not None:
            request.scope["filename"] = filename
        if name.endswith("[]"):
            found.setdefault(name, []).append(given)
        elif name in found:
            raise HttpError(INVALID, f"{name}: is given twice", param=name)
        else:
            found[name] = _plain(given) if name in json_fields else given
    return found


def check_origin(headers: Headers, origins: Collection[str]) -> None:
    """Raise HttpError 403 for a request that another web page sends than those of these origins and of the server
    itself.

    Browsers ask the server before they send JSON from such a page, but not before a form or a request without a body.
    """
    origin = headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == headers.get("host")
    if not is_own and not {"*", origin} & set(origins):
        raise HttpError(
            FOREIGN_ORIGIN, f"origin {origin!r:.80}: web pages of it may not call this server; see cors_origin"
        )


async def _form_items(headers: Headers, data: bytes) -> list[tuple[str, str | bytes, str | None]]:
    """Return the fields of a form, in order, those that are files with their names."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield data

    parser = MultiPartParser(headers, whole(), max_files=1, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError) as error:  # Starlette 1.8 and later raise only the first
        raise HttpError(INVALID, f"body: is not a form: {error}", param="body") from None
    try:
        return [
            (name, await value.read(), value.filename) if isinstance(value, UploadFile) else (name, value, None)
            for name, value in form.multi_items()
        ]
    finally:
        await form.close()


def _plain(text: Any) -> Any:
    try:
        return decoded(text)
    except HttpError:
        return text


async def parsed(parse: Callable[[object], T], body: dict[str, Any], request: Request) -> T:
    """Return ``parse(body)``, of a large body outside the event loop, and after other large ones."""
    return await in_turn(request.scope, request.scope["body_bytes"], parse, body)
