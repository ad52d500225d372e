"""Measure the HTTP front end: the server over an engine whose model computes nothing, with and without HTTP.

Clients and server are processes of this machine. For the rates, each stream sends one request after the other.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from statistics import median
from threading import Thread
from typing import Any

import numpy as np

from foreword.arrays import F32, I64
from foreword.batch import InputBatch, KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineObserver, RequestOutput, engine_config
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.request_group import RequestGroup
from foreword.errors import EngineError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.listener import Server, serve, short_turns
from foreword.server.run import allow_connections, bound_socket

PROMPT = list(range(20, 40))
STEP = 0.02  # seconds per step of a slow model
LONGEST = 900  # tokens of a stream that others join
NUM_JOINING, NUM_BURSTS = 50, 8
VOCABULARY = 4096  # the model's, whose logits are copied in each step
WORD = " time"
READY = re.compile(rb"foreword: \S+ at http")
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {}\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class FrontResult:
    """Rates with a model that takes no time; plain: the same without HTTP. With a model that takes `STEP`: what the
    server adds to the time of a first token, from the request that a client sends to the engine, and from the engine to
    the client. joining: of a stream while all others run, the median; burst: of the last one of all at the same time.
    """

    num_streams: int
    requests_s: float
    tok_s: float
    plain_tok_s: float
    joining_ms: float
    burst_ms: float


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """Seconds from the start of `foreword serve` until it answers."""

    ready_s: float


@dataclass(frozen=True, slots=True)
class _Load:
    """The requests of one measurement. rounds: of each stream; step: seconds that a step of the model takes."""

    num_streams: int
    num_tokens: int
    rounds: int
    tokenizer_of: str
    step: float = 0.0

    @property
    def params(self) -> dict[str, object]:
        return {"max_tokens": self.num_tokens, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class _Server:
    """A served process. times: asks it when each request that has ended since entered and left the engine."""

    plain_s: float
    port: int
    times: Callable[[], dict[str, tuple[float, float]]]


def run(
    *, streams: Sequence[int], num_tokens: int = 64, rounds: int = 4, model: str = "smollm2"
) -> Iterator[FrontResult]:
    """Measure each number of streams. ``model`` is the one whose tokenizer is used."""
    for num_streams in streams:
        load = _Load(num_streams, num_tokens, rounds, model)
        with _served(load) as server:
            plain_s = server.plain_s
            seconds = asyncio.run(_measure(load, partial(_connected, server.port, load)))
        slow, first = _Load(num_streams, LONGEST, 1, model, STEP), _Load(num_streams, 1, 1, model, STEP)
        with _served(slow) as server:
            burst = asyncio.run(_bursts(server, first))
            with _running(server.port, slow, num_streams - 1):
                joining = asyncio.run(_joins(server, first))
        num = num_streams * num_tokens
        yield FrontResult(num_streams, num_streams / seconds, num / seconds, num / plain_s, 1e3 * joining, 1e3 * burst)


def ready(model: str) -> ReadyResult:
    """A server of the model, started and ended. Raise EngineError if it fails."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "foreword", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        seconds = time.perf_counter() - begin
        process.kill()
    if not READY.match(line):
        raise EngineError(f"the server did not start: {line.decode(errors='replace').strip()}")
    return ReadyResult(seconds)


@contextmanager
def _process(function: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Yield a connection to a process that calls the function with its end of it; the block's end ends it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    except EOFError:
        raise EngineError("the measured process ended") from None
    finally:
        process.kill()
        process.join()
        ours.close()


@contextmanager
def _served(load: _Load) -> Iterator[_Server]:
    with _process(_serve, load) as connection:

        def times() -> dict[str, tuple[float, float]]:
            connection.send(None)
            found: dict[str, tuple[float, float]] = connection.recv()
            return found

        yield _Server(connection.recv(), connection.recv(), times)


@contextmanager
def _running(port: int, load: _Load, num_streams: int) -> Iterator[None]:
    """Streams of another process that go on within the block, all of which have begun."""
    with _process(_run_streams, port, load, num_streams) as connection:
        connection.recv()
        yield


def _run_streams(port: int, load: _Load, num_streams: int, connection: Connection) -> None:
    allow_connections()
    begun = 0

    async def stream() -> None:
        nonlocal begun
        async with _connected(port, load) as request:
            while True:
                task = asyncio.ensure_future(request())
                await asyncio.sleep(1.0)
                begun += 1
                if begun == num_streams:
                    connection.send(None)
                await task

    async def streams() -> None:
        await asyncio.gather(*(stream() for _ in range(num_streams)))
        if not num_streams:
            connection.send(None)

    asyncio.run(streams())


Request = Callable[..., Awaitable[tuple[float, float]]]
"""One request, which may be given an id: when it was sent, and when its first token was received."""


async def _measure(load: _Load, stream: Callable[[], AbstractAsyncContextManager[Request]]) -> float:
    """Return the seconds of a round of requests. The first round of each stream warms up and is not counted."""

    async def requests(request: Request) -> None:
        for _ in range(load.rounds):
            await request()

    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream()) for _ in range(load.num_streams)]
        await asyncio.gather(*(request() for request in streams))
        begin = time.perf_counter()
        await asyncio.gather(*map(requests, streams))
        return (time.perf_counter() - begin) / load.rounds


async def _joins(server: _Server, load: _Load) -> float:
    """The median of what is added to the first tokens of streams that begin at random times."""
    rng, found = Random(0), {}
    async with _connected(server.port, load) as request:
        for i in range(NUM_JOINING):
            await asyncio.sleep(rng.random() * 2 * STEP)
            found[str(i)] = await request(str(i))
    return median(_added(found, server))


async def _bursts(server: _Server, load: _Load) -> float:
    """The median of what is added to the last first token of streams that begin at the same time."""
    last = []
    async with AsyncExitStack() as stack:
        requests = [await stack.enter_async_context(_connected(server.port, load)) for _ in range(load.num_streams)]
        for _ in range(NUM_BURSTS):
            names = list(map(str, range(len(requests))))
            found = await asyncio.gather(*(one(name) for one, name in zip(requests, names, strict=True)))
            last.append(max(_added(dict(zip(names, found, strict=True)), server)))
    return median(last[1:])


def _added(found: dict[str, tuple[float, float]], server: _Server) -> list[float]:
    """Seconds that each request was not in the engine before its first token."""
    inside = server.times()
    return [received - sent - (inside[name][1] - inside[name][0]) for name, (sent, received) in found.items()]


@asynccontextmanager
async def _connected(port: int, load: _Load) -> AsyncGenerator[Request, None]:
    """Send requests over a connection of their own."""
    body = json.dumps({"prompt": PROMPT, "stream": True, **load.params})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def request(name: str = "") -> tuple[float, float]:
        begin = time.perf_counter()
        writer.write((HEAD.format(name, len(body)) + body).encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise EngineError(f"the server answered {status.decode()!r}")
        first, received = 0.0, b""
        while not received.endswith(b"0\r\n\r\n"):  # the last chunk
            part = await reader.read(1 << 16)
            if not part:
                raise EngineError("the server closed the connection")
            received = received[-16:] + part
            if not first and b"data:" in received:
                first = time.perf_counter()
        return begin, first

    try:
        yield request
    finally:
        writer.close()
        await writer.wait_closed()


class _Timed(AsyncEngine):
    """Notes when requests enter and leave the engine."""

    def __init__(self, engine: Engine) -> None:
        self.entered: dict[str, float] = {}
        self.times: dict[str, tuple[float, float]] = {}
        engine.observers.add(_Ends(self))
        super().__init__(engine)

    def run(self, group: RequestGroup) -> Any:
        self.entered[group.request_id] = time.perf_counter()
        return super().run(group)


class _Ends(EngineObserver):
    def __init__(self, engine: _Timed) -> None:
        self._engine = engine

    def request_ended(self, output: RequestOutput) -> None:
        name = output.request_id
        self._engine.times[name] = self._engine.entered.pop(name), time.perf_counter()


class _SlowModel(NothingModel):
    """Does nothing for some seconds per step."""

    def __init__(self, max_num_logits: int, vocab_size: int, step: float) -> None:
        super().__init__(max_num_logits, vocab_size)
        self._step = step

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        if self._step:
            time.sleep(self._step)
        return super().compute(batch, logits_indices)


def _engine(load: _Load, tokenizer: Tokenizer) -> Engine:
    model = _SlowModel(load.num_streams + 1, VOCABULARY, load.step)
    model.logits = np.zeros_like(model.logits)
    model.logits[:, next(i for i in tokenizer.encode(WORD) if i < VOCABULARY)] = 1.0
    scheduler = {"max_num_seqs": load.num_streams, "max_num_batched_tokens": max(2048, 32 * load.num_streams)}
    return Engine(
        model,
        vocab_size=VOCABULARY,
        max_model_len=1024,
        kv_groups=[KVGroup(16)],
        num_blocks=1 + load.num_streams * 64,
        config=engine_config(scheduler),
        tokenizer=tokenizer,
    )


def _serve(load: _Load, connection: Connection) -> None:
    """Run, in a separate process, the measurement without HTTP, then the server."""
    allow_connections()
    tokenizer = load_model(load.tokenizer_of).tokenizer
    with short_turns():
        connection.send(0.0 if load.step else asyncio.run(_without_http(load, tokenizer)))
        config = ServerConfig(port=0, max_requests=2 * load.num_streams)
        engine = _Timed(_engine(load, tokenizer))

        def answer() -> None:
            while True:
                connection.recv()
                connection.send(engine.times)

        def start(url: str) -> None:
            connection.send(sock.getsockname()[1])
            Thread(target=answer, daemon=True).start()

        sock = bound_socket(config.host, 0)
        context = Context(engine=engine, tokenizer=tokenizer, names=("nothing",), config=config)
        serve(Server(context, sock, start), sock)


async def _without_http(load: _Load, tokenizer: Tokenizer) -> float:
    async with AsyncEngine(_engine(load, tokenizer), max_num_requests=load.num_streams) as engine:

        async def request() -> tuple[float, float]:
            begin, first = time.perf_counter(), 0.0
            async for _ in engine.generate(PROMPT, SamplingParams(**load.params)):  # type: ignore[arg-type]
                first = first or time.perf_counter()
            return begin, first

        return await _measure(load, lambda: nullcontext(request))
