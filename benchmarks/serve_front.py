"""What the HTTP front end sustains: `foreword serve`'s application over an engine whose model computes nothing.

    python benchmarks/serve_front.py [--streams 1,64,256,1000] [--tokens 64]

Client and server are processes of this machine. Printed per number of streams: requests/s and tokens/s through HTTP,
tokens/s of the engine without HTTP, and the median time to the first token through HTTP and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from foreword import SamplingParams
from foreword.batch import KVGroup
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, engine_config
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.build import load_model
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.run import SWITCH_INTERVAL, Server, allow_connections, bound_socket


class LetterModel(NothingModel):
    """Always the token of an ordinary word."""

    def __init__(self, max_num_logits: int, vocab_size: int, token: int) -> None:
        super().__init__(max_num_logits, vocab_size)
        self.logits = np.zeros((max_num_logits, vocab_size), np.float32)
        self.logits[:, token] = 1.0


def make_engine(model, num_streams: int) -> Engine:
    vocabulary = 4096
    token = next(i for i in model.tokenizer.encode(" time and people world") if i < vocabulary)
    return Engine(
        LetterModel(num_streams, vocabulary, token),
        vocab_size=vocabulary,
        max_model_len=1024,
        kv_groups=[KVGroup(16)],
        num_blocks=1 + num_streams * 64,
        config=engine_config({"max_num_seqs": num_streams, "max_num_batched_tokens": max(2048, 32 * num_streams)}),
        tokenizer=model.tokenizer,
    )


def params_of(num_tokens: int) -> dict:
    return {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}


def run_server(num_streams: int, connection) -> None:
    allow_connections()
    sys.setswitchinterval(SWITCH_INTERVAL)
    model = load_model("smollm2")

    async def without_http(num_tokens: int) -> tuple[float, float]:
        """Seconds for one round, and the median time to a first token."""
        async with AsyncEngine(make_engine(model, num_streams), max_num_requests=num_streams) as serving:

            async def one() -> float:
                started, first = time.perf_counter(), 0.0
                async for _ in serving.generate(list(range(20, 40)), SamplingParams(**params_of(num_tokens))):
                    first = first or time.perf_counter() - started
                return first

            await asyncio.gather(*(one() for _ in range(num_streams)))
            started = time.perf_counter()
            firsts = await asyncio.gather(*(one() for _ in range(num_streams)))
            return time.perf_counter() - started, median(firsts)

    num_tokens = connection.recv()
    connection.send(asyncio.run(without_http(num_tokens)))
    serving = AsyncEngine(make_engine(model, num_streams))
    config = ServerConfig(port=0, max_requests=2 * num_streams)
    context = Context(engine=serving, tokenizer=model.tokenizer, names=("nothing",), config=config)
    sock = bound_socket(config.host, 0)
    server = Server(context, sock, lambda url: connection.send(sock.getsockname()[1]))
    server.run(sockets=[sock])


async def round_of(port: int, num_streams: int, num_tokens: int) -> tuple[float, float]:
    body = json.dumps({"prompt": list(range(20, 40)), "stream": True, **params_of(num_tokens)}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    request = head % len(body) + body
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_streams)]

    async def one(reader, writer) -> float:
        started = time.perf_counter()
        writer.write(request)
        first, received = 0.0, b""
        while b"[DONE]" not in received:
            received = received[-16:] + await reader.read(1 << 16)
            if not first and b"data:" in received:
                first = time.perf_counter() - started
        writer.close()
        return first

    started = time.perf_counter()
    firsts = await asyncio.gather(*(one(*connection) for connection in connections))
    return time.perf_counter() - started, median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="1,64,256,1000")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print("streams  requests/s  tokens/s  without HTTP  first token ms  without HTTP")
    for num_streams in map(int, options.streams.split(",")):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=run_server, args=(num_streams, theirs), daemon=True
        )
        process.start()
        ours.send(options.tokens)
        plain, plain_first = ours.recv()
        port = ours.recv()
        asyncio.run(round_of(port, num_streams, options.tokens))
        seconds, first = min(asyncio.run(round_of(port, num_streams, options.tokens)) for _ in range(3))
        total = num_streams * options.tokens
        print(
            f"{num_streams:7}  {num_streams / seconds:10.0f}  {total / seconds:8.0f}  {total / plain:12.0f}"
            f"  {first * 1e3:14.1f}  {plain_first * 1e3:12.1f}",
            flush=True,
        )
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
