"""What the HTTP front end sustains: the server over an engine whose model computes nothing, with and without HTTP.

Client and server are processes of this machine. Each stream sends one request after the other.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from foreword.arrays import F32, I64
from foreword.batch import InputBatch, KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, engine_config
from foreword.engine.async_engine import AsyncEngine
from foreword.errors import EngineError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.listener import serve, short_turns
from foreword.server.run import allow_connections, bound_socket

PROMPT = list(range(20, 40))
STEP, NUM_PACED = 0.02, 16  # seconds per step of a slow model, and tokens of a request to it
VOCABULARY = 4096  # of the model, whose logits are copied in each step
WORD = " time"
READY = re.compile(rb"foreword: \S+ at http")


@dataclass(frozen=True, slots=True)
class FrontResult:
    """Rates with a model that computes nothing; medians of the time to the first token with one that takes `STEP`.

    plain: the same without HTTP.
    """

    num_streams: int
    requests_s: float
    tok_s: float
    plain_tok_s: float
    first_token_ms: float
    plain_first_token_ms: float

    @property
    def added_ms(self) -> float:
        return self.first_token_ms - self.plain_first_token_ms


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


def run(
    *, streams: Sequence[int], num_tokens: int = 64, rounds: int = 4, model: str = "smollm2"
) -> Iterator[FrontResult]:
    """Each number of streams. model: whose tokenizer is used."""
    for num_streams in streams:
        plain, http = _both(_Load(num_streams, num_tokens, rounds, model))
        paced_plain, paced_http = _both(_Load(num_streams, NUM_PACED, rounds, model, STEP))
        num = num_streams * num_tokens
        yield FrontResult(
            num_streams,
            num_streams / http.seconds,
            num / http.seconds,
            num / plain.seconds,
            1e3 * paced_http.first,
            1e3 * paced_plain.first,
        )


def _both(load: _Load) -> tuple[_Times, _Times]:
    """Without HTTP, and with it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(load, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        plain, port = ours.recv(), ours.recv()
        return plain, asyncio.run(_measure(load, lambda: _connected(port, load)))
    except EOFError:
        raise EngineError("the measured process ended") from None
    finally:
        process.kill()
        process.join()


def ready(model: str) -> ReadyResult:
    """A server of the model, started and ended. EngineError if it fails."""
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


@dataclass(frozen=True, slots=True)
class _Times:
    """seconds: of a round of requests; first: median seconds to a first token."""

    seconds: float
    first: float


Request = Callable[[], Awaitable[float]]
"""One request: seconds to its first token."""


async def _measure(load: _Load, stream: Callable[[], AbstractAsyncContextManager[Request]]) -> _Times:
    """The first round of each stream warms up and is not counted. Streams of a slow model begin one after the other."""
    apart = load.step * load.num_tokens / load.num_streams
    firsts: list[float] = []

    async def requests(request: Request, delay: float) -> None:
        await asyncio.sleep(delay)
        for _ in range(load.rounds):
            firsts.append(await request())

    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream()) for _ in range(load.num_streams)]
        await asyncio.gather(*(request() for request in streams))
        begin = time.perf_counter()
        await asyncio.gather(*(requests(request, i * apart) for i, request in enumerate(streams)))
        return _Times((time.perf_counter() - begin) / load.rounds, median(firsts))


@asynccontextmanager
async def _connected(port: int, load: _Load) -> AsyncGenerator[Request, None]:
    """Requests over a connection of their own."""
    body = json.dumps({"prompt": PROMPT, "stream": True, **load.params}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def request() -> float:
        begin = time.perf_counter()
        writer.write(head % len(body) + body)
        first, received = 0.0, b""
        while not received.endswith(b"0\r\n\r\n"):  # the last chunk
            part = await reader.read(1 << 16)
            if not part:
                raise EngineError("the server closed the connection")
            received = received[-16:] + part
            if not first and b"data:" in received:
                first = time.perf_counter() - begin
        return first

    try:
        yield request
    finally:
        writer.close()
        await writer.wait_closed()


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
    model = _SlowModel(load.num_streams, VOCABULARY, load.step)
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
    """In a process of its own: the measurement without HTTP, then the server."""
    allow_connections()
    tokenizer = load_model(load.tokenizer_of).tokenizer
    with short_turns(), closing(connection):
        connection.send(asyncio.run(_without_http(load, tokenizer)))
        config = ServerConfig(port=0, max_requests=2 * load.num_streams)
        engine = AsyncEngine(_engine(load, tokenizer))
        sock = bound_socket(config.host, 0)
        context = Context(engine=engine, tokenizer=tokenizer, names=("nothing",), config=config)
        serve(context, sock, lambda url: connection.send(sock.getsockname()[1]))


async def _without_http(load: _Load, tokenizer: Tokenizer) -> _Times:
    async with AsyncEngine(_engine(load, tokenizer), max_num_requests=load.num_streams) as engine:

        async def request() -> float:
            begin, first = time.perf_counter(), 0.0
            async for _ in engine.generate(PROMPT, SamplingParams(**load.params)):  # type: ignore[arg-type]
                first = first or time.perf_counter() - begin
            return first

        return await _measure(load, lambda: nullcontext(request))
