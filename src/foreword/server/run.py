"""The server as a process: a model, an address and what goes with them.

What serves HTTP is imported while the model is loaded.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Unpack

from foreword.collector import without_collections
from foreword.engine.async_llm import AsyncLLM
from foreword.engine.loras import named_paths
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError, reason_of
from foreword.installation import install
from foreword.kv_events.log import CacheLog
from foreword.kv_events.source import KVEventSource
from foreword.models.quantized import conversions
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig

if TYPE_CHECKING:
    from foreword.engine.slots import Slots
    from foreword.server.tracing import Traces

PACKAGES = ("httptools", "msgspec", "prometheus_client", "python_multipart", "starlette", "uvicorn")
"""The packages of the extra that serves."""


def run(
    model: str,
    config: ServerConfig,
    *,
    on_ready: Callable[[str], None] | None = None,
    rank: int = 0,
    **options: Unpack[LLMOptions],
) -> None:
    """Serve a model until SIGTERM or SIGINT; requests in progress are finished then, within drain_timeout.

    on_ready: called with the address; without, it is printed. rank: its number among replicas, which its cache events
    have. options: of `AsyncLLM`, with `ENGINE_DEFAULTS`. Raise OSError if the address cannot be used, before the model
    is loaded; ConfigError without the packages that serve.
    """
    check_packages()
    config.check_files()
    allow_connections()
    with bound_socket(config.host, config.port) as sock, ExitStack() as stack:
        with without_collections():
            log = None if config.kv_events is None else _cache_log()
            names, loras = config.served_model_name or (model,), named_paths(config.adapter)
            for name in names:
                if name in loras:
                    raise ConfigError(f"adapter {name!r:.80}: is the name of the model; give another one")
            given: LLMOptions = {**ENGINE_DEFAULTS, **options, "loras": loras, "media": config.media}
            if log is not None:
                given["observers"] = [*(given.get("observers") or ()), log]
            slots, given = with_slots(config, given)
            with ThreadPoolExecutor(1) as thread:
                loading = thread.submit(AsyncLLM, model, **given)
                from foreword.server.context import Context
                from foreword.server.listener import Server, limited_end, serve
            llm = loading.result()
            if slots is not None:
                slots.attach(llm.engine)
            begin_end = stack.enter_context(limited_end(config))
            stack.callback(lambda: asyncio.run(llm.close()))
            for line in notes_of(llm):
                print(f"foreword: {line}", file=sys.stderr, flush=True)
            source = None if log is None else _publish(log, llm, config, rank, stack)
            trace = traces_of(config, names[0])
            if trace is not None:
                stack.callback(trace.close)
            context = Context(
                engine=llm,
                tokenizer=llm.tokenizer,
                media=llm.media,
                names=names,
                path=llm.model.path,
                config=config,
                kv_events=source,
                trace=trace,
                slots=slots,
            )
            notify = on_ready or (lambda url: announce(f"{names[0]} at {url}", config))
            server = Server(context, sock, notify, begin_end, logs_end=on_ready is None)
        serve(server, sock)


def _cache_log() -> CacheLog:
    """Raise ConfigError without the packages that publish events."""
    if find_spec("zmq") is None:
        raise ConfigError(f"kv_events: pyzmq is not installed. {install('events')}")
    return CacheLog()


def with_slots(config: ServerConfig, options: LLMOptions) -> tuple[Slots | None, LLMOptions]:
    """Return the slots that a server saves, and the options of their engine; `Slots.attach` is left to the caller."""
    if config.slot_save_path is None:
        return None, options
    from foreword.engine.slots import Slots  # here: few servers save conversations

    slots = Slots()
    observers, tiers = [*(options.get("observers") or ()), slots], [slots.tier, *(options.get("tiers") or ())]
    return slots, {**options, "observers": observers, "tiers": tiers}


def _publish(log: CacheLog, llm: AsyncLLM, config: ServerConfig, rank: int, stack: ExitStack) -> KVEventSource:
    """Publish the cache's events until the stack is closed."""
    from foreword.kv_events.publisher import KVEventPublisher  # which needs another extra

    assert config.kv_events is not None
    publisher = KVEventPublisher(
        log,
        [table.group for table in llm.engine.states.block_tables],
        endpoint=config.kv_events,
        replay_endpoint=config.kv_events_replay,
        topic=config.kv_events_topic,
        format="array" if config.kv_events_arrays else "map",
        rank=rank,
    )
    stack.enter_context(publisher)
    return publisher.source


def traces_of(config: ServerConfig, model: str) -> Traces | None:
    """Return what sends a span of each request, which is to be closed; None if the settings name no address.

    Raise ConfigError without the packages that do.
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from foreword.server import tracing  # which needs another extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"otlp_traces_endpoint: {error.name} is not installed. {install('otel')}") from None
    return tracing.Traces(config.otlp_traces_endpoint, model)


def notes_of(llm: AsyncLLM) -> tuple[str, ...]:
    """Return what a log says of the start of a model."""
    return *conversions(llm.model.weights.values()), *llm.engine.notes


def check_packages() -> None:
    """Raise ConfigError without the packages that serve."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}. {install('serve')}")


def allow_connections() -> None:
    """Raise the limit of open files, each connection being one, as far as the system lets this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def announce(text: str, config: ServerConfig) -> None:
    """Say that the server is ready, and if other machines may use it without a key."""
    print(f"foreword: {text}", file=sys.stderr, flush=True)
    addresses = {info[4][0] for info in socket.getaddrinfo(config.host, None)}
    if not config.api_key and not all(ip_address(str(one).partition("%")[0]).is_loopback for one in addresses):
        line = f"host={config.host}: every machine that reaches it may use the model; api_key lets only some"
        print(f"foreword: {line}", file=sys.stderr, flush=True)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket at an address; connections are refused until it listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise OSError(f"{host}:{port}: {reason_of(error)}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return sock
