"""The server's sockets: HTTP by uvicorn with limits for the heads of requests, and the start and end of the server in a
process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from types import FrameType

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreword.names import counted
from foreword.server.app import make_app
from foreword.server.batches import Batches
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.models import Models

GRACE = 10.0  # seconds for the work that is left after the last request
MOST_DISCARDED = 1 << 20  # bytes that are received after a refusal, so that the client can read it
DISCARD_SECONDS = 2.0
LAST_SECONDS = 0.5  # for threads that end at the same time as the process
SMALL_CHUNK, MOST_SMALL = 64, 1 << 11  # bytes of a chunk of a body, and how many of fewer bytes a body may have
MOST_PIPELINED = 16  # requests of a connection that wait for the answers of earlier ones
MOST_DIGITS = 640  # digits of an integer: the lowest limit that Python accepts
SWITCH_INTERVAL = 0.0005  # seconds; a tenth of Python's own gives 1.7 times the tokens/s of 64 streams


def serve(server: AppServer, sock: socket.socket) -> None:
    """Run the server until a signal.

    Meanwhile Python's threads take short turns, so that the event loop does not wait 5 ms for the engine's thread.
    """
    # uvicorn raises it again in the end
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with short_turns(), short_collections(), short_integers():
            server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def limited_end(config: ServerConfig) -> Iterator[Callable[[], None]]:
    """Within the block, calling the value begins the end of the server, which must be left within drain_timeout and
    `GRACE`. If it is not, because a thread is stuck in a disk, a device or a slow host, the process ends there.
    """
    limit = threading.Timer(config.drain_timeout + GRACE, end_process, ["the server did not end in time"])
    limit.daemon = True
    try:
        yield limit.start
    finally:
        limit.cancel()


def end_process_if_stuck() -> None:
    """End the process if threads run for which the interpreter would wait at its end, beyond `LAST_SECONDS`."""
    until = time.monotonic() + LAST_SECONDS
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0.0))
    names = [thread.name for thread in others if thread.is_alive()]
    if names:
        end_process(f"threads are still running: {', '.join(names)}")


def end_process(reason: str) -> None:
    """End the process with status 1, without waiting for its threads."""
    with suppress(OSError):
        print(f"foreword: {reason}; the process ends without them", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def short_turns() -> Iterator[None]:
    """Within the block, Python's threads take turns of `SWITCH_INTERVAL`."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def short_collections() -> Iterator[None]:
    """Within the block, Python's garbage collector does not visit objects that exist now, such as the model and its
    tokenizer, and visits the others a tenth as often, because no other thread runs during a collection.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 10 * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def short_integers() -> Iterator[None]:
    """Within the block, no text of more than `MOST_DIGITS` digits is converted to an integer, because the time grows
    with the square of the digits.
    """
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MOST_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


class AppServer(uvicorn.Server):
    """uvicorn with the settings of a server. It may run in any thread; ``should_exit = True`` ends it.

    on_ready: called with the server's address. on_end: called when it begins to end. logs_end: whether it logs its end
    on standard error, with what happens to requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        sock: socket.socket,
        on_ready: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        *,
        logs_end: bool = False,
    ) -> None:
        scheme = "http" if config.tls_certificate is None else "https"
        host, port = sock.getsockname()[:2]
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._on_ready, self._on_end = on_ready, on_end
        self._logs_end, self._ended_by = logs_end, "ended by its program"
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(config),
                ws="none",
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                backlog=2048,
                timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close them
                timeout_graceful_shutdown=ceil(config.drain_timeout),
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._ended_by = f"got {signal.Signals(sig).name}"  # a handler of a signal must not write
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        seconds = self.config.timeout_graceful_shutdown
        self._log(self._ended_by, "the port is closed", self._describe_progress(f"they may end within {seconds} s"))
        await super().shutdown(sockets)
        self._log("the server ended", self._describe_progress("cut, since the time is over"))
        if self.server_state.tasks:  # cancelled: their clients get an error
            await asyncio.wait(self.server_state.tasks, timeout=1.0)
        await asyncio.sleep(0)
        for connection in list(self.server_state.connections):  # the client did not read to the end in time
            connection.transport.abort()

    def _log(self, *parts: str) -> None:
        if self._logs_end:
            print("foreword:", "; ".join(parts), file=sys.stderr, flush=True)

    def _describe_progress(self, what: str) -> str:
        """Return a text with the number of requests in progress and what happens to them."""
        count = len(self.server_state.tasks)
        return f"{counted(count, 'request')} in progress: {what}" if count else "no request is in progress"


class ModelServer(AppServer):
    """An `AppServer` with the application of models, which also answers their batches."""

    def __init__(
        self,
        models: Models,
        sock: socket.socket,
        on_ready: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        *,
        logs_end: bool = False,
    ) -> None:
        super().__init__(make_app(models), models.config, sock, on_ready, on_end, logs_end=logs_end)
        models.shared.store.claim(name for entry in models.entries for name in entry.served.names)
        self._models = models
        self._batches: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._models.shared.store.directory is not None:
            self._batches = asyncio.create_task(Batches(self._models).run())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._batches is not None:
            self._batches.cancel()  # the next process continues them
            await asyncio.wait((self._batches,))
        await super().shutdown(sockets)
        self._models.shared.store.close()


class Server(ModelServer):
    """A `ModelServer` of one model."""

    def __init__(
        self,
        context: Context,
        sock: socket.socket,
        on_ready: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        *,
        logs_end: bool = False,
    ) -> None:
        super().__init__(Models.of(context), sock, on_ready, on_end, logs_end=logs_end)


class _Parser(HttpRequestParser):
    """A parser that ignores the request of a client for another protocol, such as that of Java's client for HTTP/2.

    httptools takes everything after such a head, a body too, for the other protocol. It is given to ``read_on``.
    """

    def __init__(self, protocol: HttpToolsProtocol, read_on: Callable[[bytes], None]) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._read_on = read_on

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])


def _protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with limits: the bytes of a head and of trailers, the time for a head, the number of
    requests that are sent before the answers of earlier ones, and the time in which a client reads nothing of these
    answers.
    """

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self.parser = _Parser(self, self._read_without_upgrade)
            self._num_bytes = 0  # received since the last end of a head or piece of a body
            self._chunks: list[bytes] = []  # parts of the body that have just arrived
            self._num_small = 0  # chunks of it
            self._num_field_bytes = 0  # bytes of the head and the trailers of the request that is read
            self._in_head = True
            self._num_discarded: int | None = None  # after a refusal
            self._deadline: asyncio.TimerHandle | None = self._new_deadline()
            self._unsent_check: asyncio.TimerHandle | None = None  # while the client does not read

        def data_received(self, data: bytes) -> None:
            if self._num_discarded is not None:
                self._num_discarded += len(data)
                if self._num_discarded > MOST_DISCARDED:
                    self.transport.close()
                return
            if self._deadline is None and self._is_between_requests():
                self._deadline = self._new_deadline()
            self._num_bytes += len(data)
            super().data_received(data)
            self._pass_chunks()
            if self._num_bytes > config.max_header_bytes:
                self._close(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= MOST_PIPELINED:
                raise ValueError("too many requests before the answer of the first")
            super().on_message_begin()
            self._num_field_bytes, self._in_head, self._num_small = 0, True, 0
            if self._deadline is None:
                self._deadline = self._new_deadline()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            if self._in_head:  # trailers are ignored: the head has been checked without them
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade():  # the head is parsed again
                if self.parser.get_method() == b"CONNECT":
                    raise ValueError("the server is not a proxy")
                return
            self._num_bytes, self._in_head = 0, False
            self._end_head()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            self._chunks.append(body)
            if len(body) < SMALL_CHUNK:
                self._num_small += 1
                if self._num_small > MOST_SMALL:
                    raise ValueError("too many small chunks")

        def _pass_chunks(self) -> None:
            """Pass on the received bytes of a body in one piece, because uvicorn copies the body with each piece."""
            if self._chunks:
                super().on_body(b"".join(self._chunks))
                self._chunks = []

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._num_bytes = 0
            self._pass_chunks()
            if self._is_between_requests():  # the rest of a body whose request was refused before
                self._end_head()
            super().on_message_complete()

        def _read_without_upgrade(self, rest: bytes) -> None:
            """Parse the last head again, without its request for another protocol, and the bytes that follow it."""
            kept = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            self.parser = _Parser(self, self._read_without_upgrade)
            self.parser.feed_data(b"%s%s\r\n%s" % (line, b"".join(kept), rest))

        def send_400_response(self, msg: str) -> None:
            if self._num_field_bytes > config.max_header_bytes:
                self._close(b"431 Request Header Fields Too Large")
            else:
                self._close(b"400 Bad Request")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_unsent()

        def resume_writing(self) -> None:
            self._end_watch()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            self._end_watch()
            super().connection_lost(exc)

        def _count(self, num_bytes: int) -> None:
            self._num_field_bytes += num_bytes
            if self._num_field_bytes > config.max_header_bytes:
                raise ValueError("the head is too large")  # the parser stops: see send_400_response

        def _new_deadline(self) -> asyncio.TimerHandle:
            return self.loop.call_later(config.receive_timeout, self._close, b"408 Request Timeout")

        def _is_between_requests(self) -> bool:
            return not self.cycle or self.cycle.response_complete

        def _is_answering(self) -> bool:
            """Return whether an answer has begun or is due before the request that is read, so no other may follow."""
            if self.cycle is None or self.cycle.response_complete:
                return bool(self.pipeline)
            return self.cycle.response_started or not self.cycle.more_body  # with a whole body, the next one is read

        def _watch_unsent(self) -> None:
            """Check after some time whether the client has read any of the bytes that wait for it."""
            waiting = self.transport.get_write_buffer_size()
            self._unsent_check = self.loop.call_later(config.send_timeout, self._check_unsent, waiting)

        def _check_unsent(self, before: int) -> None:
            if self.transport.get_write_buffer_size() >= before:
                self.transport.abort()
            else:
                self._watch_unsent()

        def _end_watch(self) -> None:
            if self._unsent_check is not None:
                self._unsent_check.cancel()
                self._unsent_check = None

        def _end_head(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _close(self, status: bytes) -> None:
            """Refuse the request. The connection stays open briefly: if it were closed with unread bytes, it would be
            reset, and the client could not read the refusal.
            """
            self._end_head()
            if self._is_answering():
                self.transport.abort()
            elif self._num_discarded is None and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                if self.transport.can_write_eof():
                    self.transport.write_eof()
                self._num_discarded = 0
                if self.cycle is not None:  # a request whose body is refused
                    self.cycle.disconnected = True
                    self.cycle.message_event.set()
                self.flow.resume_reading()
                self.loop.call_later(DISCARD_SECONDS, self.transport.close)

    return Protocol
