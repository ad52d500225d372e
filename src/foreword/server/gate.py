"""The checks around every route: keys, limits, closed connections, errors, the access log, and failures in the log."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import getrandbits
from traceback import print_exception
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.openai.frames import AnswerStream
from foreword.server.access import Hosts, Keys
from foreword.server.bodies import Bodies, HeldBody
from foreword.server.client import Client
from foreword.server.config import ServerConfig
from foreword.server.errors import Dialect, HttpError, as_http_error, not_found
from foreword.server.events import STREAMS
from foreword.server.failures import (
    BODY_TOO_LONG,
    CLOSED,
    EXPECTATION,
    HEAD_TOO_LONG,
    INVALID,
    METHOD_NOT_ALLOWED,
    STOPPED,
    TOO_SLOW,
    WRONG_BODY,
)
from foreword.server.operation import Operation, Operations, Target
from foreword.server.pace import Beginnings
from foreword.server.reply import check_origin

MOST_REASON = 2048  # bytes of a body in the log
CONTINUE = b"100-continue"
SINGLE = (b"host", b"authorization", b"x-api-key", b"origin", b"content-type", b"content-encoding", b"expect",
          b"x-request-id", b"x-request-timeout")  # fmt: skip
"""Headers that must not be given twice, because a program before the server may read the other value."""
WITH_BODY = ("POST", "DELETE")
"""Methods whose bodies are read."""
MOST_DISCARDED = 64 << 20  # bytes of a body that is refused
NO_STREAM = AnswerStream[Any]()
PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """An ASGI application that wraps another one.

    It finds the operation of each request, for the other application in ``scope["operation"]``, with the values in its
    path in ``scope["path_params"]``. The body of a request is received as a whole, within limits, before its handler
    begins. A handler whose client closes the connection is cancelled, whether its response is a stream or not.
    """

    def __init__(self, app: ASGIApp, operations: Operations, config: ServerConfig, responses: Counter[int]) -> None:
        """Count responses by their status in ``responses``."""
        self._app, self._operations, self._config, self._keys = app, operations, config, Keys(config)
        self._hosts, self._bodies = Hosts(config), Bodies(config.max_total_body_bytes)
        self._beginnings = Beginnings()
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if PLAIN_ID.fullmatch(given) else b"%032x" % getrandbits(128)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        target = self._operations.target(scope["method"], path)
        held = HeldBody(self._bodies)
        incoming = _Incoming(scope, headers, receive, self._config, held)
        response = _Response(send, request_id, target.errors, incoming)
        started, failure = time.perf_counter(), ""
        scope["request_id"] = request_id.decode()  # an answer may add "stream": its `AnswerStream`
        scope["turn"] = self._bodies.turn
        try:
            self._check_head(scope, headers)
            self._hosts.check(headers)
            self._keys.check(target.access, path, headers)
            scope.setdefault("requester", Client.of(scope, self._config))  # a front end in the process has set it
            operation = _found(target, scope)
            scope["operation"], scope["path_params"] = operation, target.parameters
            body = await incoming.read()
            if operation.body is not None and (operation.body.form is not None or not body):
                check_origin(Headers(scope=scope), self._config.cors_origin)
            scope["body_bytes"], again = len(body), _replay(body)
            del body  # it is not kept in memory while a long answer is made
            async with _while_connected(receive), AsyncExitStack() as stack:
                scope["stack"] = stack  # resources that end with the request
                if operation.body is not None:
                    await self._beginnings.take()
                await self._app(scope, again, response)
        except asyncio.CancelledError:  # cancelled by the server, which ends; the task ends with this
            stopped = HttpError(STOPPED, failure := "the server is being stopped")
            await response.fail(stopped, scope)
        except Exception as error:
            known = _known(error)
            failure = f"{type(error).__name__}: {error}" if known.status >= 500 else ""
            await response.fail(known, scope)
        finally:
            held.end()
        self._responses[response.status or CLOSED.status] += 1
        failure = failure or response.failure
        if self._config.access_log or failure:
            self._log(scope, response, time.perf_counter() - started, failure)

    def _check_head(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError for a head that is too long or asks for what no operation does. A head that does not arrive
        completely is refused before.
        """
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if size > (limit := self._config.max_header_bytes):
            reason = f"the head is longer than max_header_bytes = {limit}"
            raise HttpError(HEAD_TOO_LONG, reason, headers={"Connection": "close"})
        if len(headers) < len(scope["headers"]):
            counts = Counter(name for name, _ in scope["headers"])
            for name in (name for name in SINGLE if counts[name] > 1):
                raise HttpError(INVALID, f"the header {name.decode()} is given twice: give it once")
        if headers.get(b"expect", CONTINUE).lower() != CONTINUE:
            raise HttpError(EXPECTATION, "Expect: nothing but 100-continue can be expected")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(
                WRONG_BODY, "Content-Encoding: send the body as it is", headers={"Accept-Encoding": "identity"}
            )

    def _log(self, scope: Scope, response: _Response, seconds: float, failure: str) -> None:
        """Write a line of JSON. failure: why the server failed, "" if it did not."""
        client = scope.get("client")
        line = {
            "time": round(time.time(), 3),
            "request_id": scope["request_id"],
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": response.status or CLOSED.status,
            "seconds": round(seconds, 4),
            "bytes": response.num_bytes,
        }
        if failure:
            line["error"] = failure
        print(json.dumps(line), file=sys.stderr, flush=True)


class _Incoming:
    """The body of a request as it arrives."""

    def __init__(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, config: ServerConfig, held: HeldBody
    ) -> None:
        self._has_body, self._headers, self._receive = scope["method"] in WITH_BODY, headers, receive
        self._config = config
        self._held = held
        self._waits = b"expect" in headers  # the client, until the body is asked for
        self.is_left = True

    async def read(self) -> bytes:
        """Return the whole body. Raise HttpError if it is too long or too slow, or if others take the memory."""
        if not self._has_body:
            self.is_left = False
            return b""
        limit = self._config.max_body_bytes
        fix = "Send a shorter one, such as smaller images, or raise this setting"
        too_long = HttpError(
            BODY_TOO_LONG, f"the body is longer than max_body_bytes = {limit}. {fix}", headers={"Connection": "close"}
        )
        declared = self._headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_long
        parts, size, self._waits = [], 0, False
        try:
            async with asyncio.timeout(self._config.receive_timeout):
                while self.is_left:
                    parts.append(await self._next())
                    size += len(parts[-1])
                    if size > limit:
                        raise too_long
                    self._held.grow(size)
        except TimeoutError:
            self.is_left = False  # the time has passed
            raise HttpError(TOO_SLOW, "the body did not arrive in time", headers={"Connection": "close"}) from None
        return b"".join(parts)

    async def discard(self) -> None:
        """Receive what a client still sends, within limits: a connection that is closed before would be reset, and the
        client could not read its response.
        """
        size = 0
        with suppress(TimeoutError, HttpError, asyncio.CancelledError):  # cancelled by the server, which ends
            async with asyncio.timeout(self._config.receive_timeout):
                while self.is_left and not self._waits and size < MOST_DISCARDED:
                    size += len(await self._next())

    async def _next(self) -> bytes:
        """Return the next piece. Raise HttpError if the connection was closed."""
        message = await self._receive()
        self.is_left = message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise HttpError(CLOSED, "the connection was closed")
        body: bytes = message.get("body", b"")
        return body


class _Response:
    """Forwards the messages of a response, with the id of its request."""

    def __init__(self, send: Send, request_id: bytes, errors: Dialect, incoming: _Incoming) -> None:
        self._send, self._request_id, self._errors, self._incoming = send, request_id, errors, incoming
        self.status: int | None = None  # None before the response begins
        self.num_bytes = 0
        self._beginning = b""  # the first bytes of the body
        self.is_stream = self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            self.is_stream = any(value.startswith(STREAMS) for name, value in headers if name == b"content-type")
            message["headers"] = [*headers, (b"x-request-id", self._request_id)]
        else:
            self.is_complete = not message.get("more_body", False)
            self.num_bytes += len(message.get("body", b""))
            self._beginning = self._beginning or message.get("body", b"")[:MOST_REASON]
        await self._send(message)

    @property
    def failure(self) -> str:
        """The beginning of the body of a response with a status of 5xx; "" for others."""
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
        await self({"type": "http.response.body", "body": body, "more_body": self._incoming.is_left})
        if not self.is_complete:
            await self._incoming.discard()
            await self({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncGenerator[None, None]:
    """Cancel the block when the client closes the connection; the block then ends as if it were done."""
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
    """Return a `receive` whose first message has the whole body."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        while not messages:
            await asyncio.get_running_loop().create_future()  # cancelled with the handler
        return messages.pop()

    return again


def _found(target: Target, scope: Scope) -> Operation:
    """Return the operation. Raise HttpError 405 for another method of its path, 404 for an unknown path."""
    if target.operation is not None:
        return target.operation
    if not target.methods:
        raise not_found(scope["method"], scope["path"])
    allowed = ", ".join(target.methods).replace("GET", "GET, HEAD")
    raise HttpError(
        METHOD_NOT_ALLOWED, f"{scope['method']} {scope['path']}: Method Not Allowed", headers={"Allow": allowed}
    )


def _known(error: Exception) -> HttpError:
    if not isinstance(error, HttpError | ForewordError | TimeoutError):
        print_exception(error)
    return as_http_error(error)
