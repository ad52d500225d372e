"""What surrounds every route: keys, limits, closed connections, errors, the access log, and failures in the log."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import getrandbits
from traceback import print_exception
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.openai.frames import AnswerStream
from foreword.server.access import Hosts, Keys
from foreword.server.config import ServerConfig
from foreword.server.errors import Dialect, HttpError, as_http_error, not_found
from foreword.server.operation import Operation, Operations, Target
from foreword.server.reply import check_origin

CLOSED = 499  # status of a request whose client has closed the connection; it is counted, and not sent
MOST_REASON = 2048  # bytes of a body in the log
NO_STREAM = AnswerStream[Any]()
PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """An ASGI application around another one.

    It finds the operation of each request, for the other application in ``scope["operation"]``, with the values in its
    path in ``scope["path_params"]``. The body of a request is received as a whole, within limits, before its handler
    begins. A handler whose client closes the connection is cancelled, whether its response is a stream or not.
    """

    def __init__(self, app: ASGIApp, operations: Operations, config: ServerConfig, responses: Counter[int]) -> None:
        """responses: counts the requests by the status of their response."""
        self._app, self._operations, self._config, self._keys = app, operations, config, Keys(config)
        self._hosts = Hosts(config)
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if PLAIN_ID.fullmatch(given) else b"%032x" % getrandbits(128)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        target = self._operations.target(scope["method"], path)
        response = _Response(send, request_id, target.errors)
        started, failure = time.perf_counter(), ""
        scope["request_id"] = request_id.decode()  # an answer may add "stream": its `AnswerStream`
        try:
            self._check_head(scope)
            self._hosts.check(headers)
            self._keys.check(target.access, path, headers)
            scope["operation"], scope["path_params"] = _found(target, scope), target.parameters
            body = await self._body(scope, headers, receive)
            scope["body_bytes"] = len(body)
            if scope["method"] == "POST" and not body:
                check_origin(Headers(scope=scope), self._config.cors_origin)
            async with _while_connected(receive), AsyncExitStack() as stack:
                scope["stack"] = stack  # what ends with the request
                await self._app(scope, _replay(body), response)
        except asyncio.CancelledError:  # by the server, which ends; the task ends with this
            stopped = HttpError(503, failure := "the server is being stopped", code="stopped")
            await response.fail(stopped, scope)
        except Exception as error:
            known = _known(error)
            failure = f"{type(error).__name__}: {error}" if known.status >= 500 else ""
            await response.fail(known, scope)
        self._responses[response.status or CLOSED] += 1
        failure = failure or response.failure
        if self._config.access_log or failure:
            self._log(scope, response, time.perf_counter() - started, failure)

    def _check_head(self, scope: Scope) -> None:
        """HttpError for a head that is too long. One that does not arrive as a whole is refused before."""
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if size > (limit := self._config.max_header_bytes):
            reason = f"the head is longer than max_header_bytes = {limit}"
            raise HttpError(431, reason, headers={"Connection": "close"})

    async def _body(self, scope: Scope, headers: MutableMapping[bytes, bytes], receive: Receive) -> bytes:
        """The whole body. HttpError if it is too long or too slow."""
        if scope["method"] != "POST":
            return b""
        limit = self._config.max_body_bytes
        too_long = HttpError(413, f"the body is longer than max_body_bytes = {limit}", headers={"Connection": "close"})
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._config.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(CLOSED, "the connection was closed")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_long
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None

    def _log(self, scope: Scope, response: _Response, seconds: float, failure: str) -> None:
        """Write a line of JSON. failure: why the server failed, "" if it did not."""
        client = scope.get("client")
        line = {
            "time": round(time.time(), 3),
            "request_id": scope["request_id"],
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": response.status or CLOSED,
            "seconds": round(seconds, 4),
            "bytes": response.num_bytes,
        }
        if failure:
            line["error"] = failure
        print(json.dumps(line), file=sys.stderr, flush=True)


class _Response:
    """Passes the messages of a response on, with the id of its request."""

    def __init__(self, send: Send, request_id: bytes, errors: Dialect) -> None:
        self._send, self._request_id, self._errors = send, request_id, errors
        self.status: int | None = None  # None before the response begins
        self.num_bytes = 0
        self._beginning = b""  # of the body
        self.is_stream = self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            self.is_stream = any(value.startswith(b"text/event-stream") for name, value in headers)
            message["headers"] = [*headers, (b"x-request-id", self._request_id)]
        else:
            self.is_complete = not message.get("more_body", False)
            self.num_bytes += len(message.get("body", b""))
            self._beginning = self._beginning or message.get("body", b"")[:MOST_REASON]
        await self._send(message)

    @property
    def failure(self) -> str:
        """The beginning of the body of a response that says that the server failed, "" of others."""
        return self._beginning.decode(errors="replace") if (self.status or 0) >= 500 else ""

    async def fail(self, error: HttpError, scope: Scope) -> None:
        """Answer with an error, or end the stream that has begun with one."""
        if self.status is not None:
            if not self.is_complete and self.is_stream:
                stream: AnswerStream[Any] = scope.get("stream", NO_STREAM)
                frame = stream.failed(str(error)) or self._errors.frame(error)
                await self({"type": "http.response.body", "body": frame})
            return
        body = msgspec.json.encode(self._errors.body(error))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self({"type": "http.response.body", "body": body})


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncGenerator[None, None]:
    """Cancels the block when the client closes the connection; then it ends as if it were done."""
    task = asyncio.current_task()
    assert task is not None
    is_closed = False

    async def watch() -> None:
        nonlocal is_closed
        while (await receive())["type"] != "http.disconnect":
            pass
        is_closed = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_closed or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


def _replay(body: bytes) -> Receive:
    """A `receive` that has the whole body as its first message."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        while not messages:
            await asyncio.get_running_loop().create_future()  # cancelled with the handler
        return messages.pop()

    return again


def _found(target: Target, scope: Scope) -> Operation:
    """Return the operation. HttpError 405 for another method of its path, 404 for an unknown path."""
    if target.operation is not None:
        return target.operation
    if not target.methods:
        raise not_found(scope["method"], scope["path"])
    allowed = ", ".join(target.methods).replace("GET", "GET, HEAD")
    raise HttpError(405, f"{scope['method']} {scope['path']}: Method Not Allowed", headers={"Allow": allowed})


def _known(error: Exception) -> HttpError:
    if not isinstance(error, HttpError | ForewordError | TimeoutError):
        print_exception(error)
    return as_http_error(error)
