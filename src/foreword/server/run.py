"""The server as a process: a socket, signals, and the limits of heads of requests."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from math import ceil
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreword.engine.async_llm import AsyncLLM
from foreword.engine.loras import named_paths
from foreword.errors import ConfigError
from foreword.kv_events.log import CacheLog
from foreword.kv_events.source import KVEventSource
from foreword.models.quantized import conversions
from foreword.server.app import make_app
from foreword.server.config import ServerConfig
from foreword.server.context import Context, Trace

SWITCH_INTERVAL = 0.0005  # seconds; a tenth of Python's own gives 1.7 times the tokens/s of 64 streams


def run(model: str, config: ServerConfig, **options: Any) -> None:
    """Serve a model until SIGTERM or SIGINT; requests in progress are finished then, within drain_timeout.

    options: of `AsyncLLM`; without a seed, each run draws other tokens. OSError if the address cannot be used, before
    the model is loaded.
    """
    allow_connections()
    with bound_socket(config.host, config.port) as sock, ExitStack() as stack:
        log = None if config.kv_events is None else _cache_log()
        observers = () if log is None else (log,)
        names, loras = config.served_model_name or (model,), named_paths(config.adapter)
        for name in names:
            if name in loras:
                raise ConfigError(f"adapter {name!r:.80}: is the name of the model; give another one")
        llm = AsyncLLM(model, observers=observers, loras=loras, **{"seed": None, **options})
        stack.callback(lambda: asyncio.run(llm.close()))
        for line in conversions(llm.model.weights.values()):
            print(f"foreword: {line}", file=sys.stderr, flush=True)
        source = None if log is None else _publish(log, llm, config, stack)
        trace = None if config.otlp_traces_endpoint is None else _trace(config.otlp_traces_endpoint, names[0], stack)
        context = Context(
            engine=llm, tokenizer=llm.tokenizer, names=names, config=config, kv_events=source, trace=trace
        )
        serve(context, sock, lambda url: print(f"foreword: {names[0]} at {url}", file=sys.stderr, flush=True))


def _cache_log() -> CacheLog:
    """ConfigError without the packages that publish events."""
    if find_spec("zmq") is None:
        raise ConfigError("kv_events: pyzmq is not installed; install foreword[events]")
    return CacheLog()


def _publish(log: CacheLog, llm: AsyncLLM, config: ServerConfig, stack: ExitStack) -> KVEventSource:
    """Publish the cache's events until the stack is closed."""
    from foreword.kv_events.publisher import KVEventPublisher  # of another extra

    assert config.kv_events is not None
    publisher = KVEventPublisher(
        log,
        [table.group for table in llm.engine.states.block_tables],
        endpoint=config.kv_events,
        replay_endpoint=config.kv_events_replay,
        topic=config.kv_events_topic,
        format="array" if config.kv_events_arrays else "map",
    )
    stack.enter_context(publisher)
    return publisher.source


def _trace(endpoint: str, model: str, stack: ExitStack) -> Trace:
    """Send a span of each request until the stack is closed. ConfigError without the packages that do."""
    try:
        from foreword.server.tracing import Traces  # of another extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"otlp_traces_endpoint: {error.name} is not installed; install foreword[otel]") from None
    traces = Traces(endpoint, model)
    stack.callback(traces.close)
    return traces.add


def allow_connections() -> None:
    """Raise the limit of open files, each connection being one, as far as the system lets this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address; connections are refused until it listens."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return sock


def serve(context: Context, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until a signal. on_ready: called with the server's address.

    Meanwhile Python's threads take short turns, so that the event loop does not wait 5 ms for the engine's.
    """
    server = Server(context, sock, on_ready)
    # uvicorn raises it again in the end
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with short_turns():
            server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def short_turns() -> Iterator[None]:
    """Within the block, Python's threads take turns of `SWITCH_INTERVAL`."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class Server(uvicorn.Server):
    """uvicorn with the application of a context. It may run in any thread; ``should_exit = True`` ends it."""

    def __init__(self, context: Context, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
        config = context.config
        scheme = "http" if config.tls_certificate is None else "https"
        host, port = sock.getsockname()[:2]
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                make_app(context),
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled: they tell their clients
            await asyncio.wait(self.server_state.tasks, timeout=1.0)
        await asyncio.sleep(0)
        for connection in list(self.server_state.connections):  # whose client did not read to the end in time
            connection.transport.abort()


def _protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with limits of the head of a request: its bytes, and the time for it."""

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._head_bytes = 0
            self._deadline: asyncio.TimerHandle | None = self._new_deadline()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self._is_between_requests():
                self._head_bytes, self._deadline = 0, self._new_deadline()
            self._head_bytes += len(data)
            super().data_received(data)
            if self._deadline is not None and self._head_bytes > config.max_header_bytes:
                self._close(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def _new_deadline(self) -> asyncio.TimerHandle:
            return self.loop.call_later(config.receive_timeout, self._close, b"408 Request Timeout")

        def _is_between_requests(self) -> bool:
            return not self.cycle or self.cycle.response_complete

        def _end_head(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _close(self, status: bytes) -> None:
            self._end_head()
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                self.transport.close()

    return Protocol
