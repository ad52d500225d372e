"""Send one HTTP request to a replica over its own connection: closing the connection cancels the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from httptools import HttpParserError, HttpResponseParser

from foreword.openai.frames import EVENTS, LINES

Headers = Iterable[tuple[bytes, bytes]]
READ_BYTES = 64 << 10
SEPARATORS = {EVENTS.encode(): b"\n\n", LINES.encode(): b"\n"}


class ReplicaLostError(Exception):
    """The replica did not answer, or its answer ended too early."""


class Response:
    """A response that is arriving. status and headers are known after `begin`; names are in lower case.

    has_body: False for HEAD, whose responses end with their headers.
    """

    def __init__(self, reader: asyncio.StreamReader, *, has_body: bool = True) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._has_body = has_body
        self._reader, self._parser = reader, HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_begun = self._is_complete = False

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def separator(self) -> bytes | None:
        """Return the text that ends each piece of a stream (an event or a line of JSON), or None if the body is not a
        stream.
        """
        kind = next((value.partition(b";")[0] for name, value in self.headers if name == b"content-type"), b"")
        return SEPARATORS.get(kind)

    @property
    def is_short(self) -> bool:
        """Return whether the response has no body, or its body is short enough to be read at once."""
        return not self._has_body or any(name == b"content-length" for name, _ in self.headers)

    async def begin(self) -> None:
        """Wait for the headers. Raise ReplicaLostError if the connection ends; the other methods do the same."""
        while not self._is_begun:
            await self._read()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the body as they arrive."""
        while True:
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                yield data
            elif self._is_complete:
                return
            else:
                await self._read()

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    async def _read(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ReplicaLostError("the replica closed the connection")
            self._parser.feed_data(data)
        except (OSError, HttpParserError) as error:
            raise ReplicaLostError(str(error)) from None

    # -- called by the parser ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_begun, self._is_complete = True, not self._has_body

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True


@asynccontextmanager
async def request(
    port: int, method: str, target: bytes, headers: Headers = (), body: bytes = b""
) -> AsyncGenerator[Response, None]:
    """Send a request to a port of this machine, and give its response when it has begun. Leaving the block closes the
    connection.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise ReplicaLostError(str(error)) from None
    try:
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), b"host: replica", b"connection: close"]
        lines += [b"%s: %s" % header for header in headers]
        if method == "POST":
            lines.append(b"content-length: %d" % len(body))
        try:
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            await writer.drain()
        except OSError as error:
            raise ReplicaLostError(str(error)) from None
        response = Response(reader, has_body=method != "HEAD")
        await response.begin()
        yield response
    finally:
        writer.transport.abort()
