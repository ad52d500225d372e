"""A server under storms for minutes: every whole answer is checked, nothing may be left, and memory stays flat.

    PYTHONPATH=src:tests:tests/cli python tests/server/soak.py --minutes 10 [--seed 3]

`foreword serve` runs in a process of its own. Waves of clients follow one another: up to 1,000 streams at once, clients
that leave at any moment, that read slowly, that send nothing. After each wave nothing may be in use. A violation ends
the program with 1.
"""

import argparse
import asyncio
import random
import re
import resource
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import httpx
from processes import start
from storm_clients import client_of, leave, read_slowly, stay_silent, text_of
from talking_model import write_talking_model

NUM_ANSWERS = 63  # different requests of `storm_clients.body`
WARM_UP = 0.3  # the part of the run before memory is compared
MOST_GROWTH = 24 << 20  # bytes, after the warm-up
PATIENCE = 30.0
KV = str(4 << 20)  # bytes
IN_USE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def in_use(client: httpx.AsyncClient) -> dict[str, float]:
    """The gauges that are not 0."""
    text = (await client.get("/metrics")).text
    found = {name: float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for name in IN_USE}
    return {name: value for name, value in found.items() if value}


async def wave(url: str, client: httpx.AsyncClient, alone: list[str], dice: random.Random) -> int:
    """One crowd of clients. The number of its whole answers."""
    num = dice.choice((40, 200, 1000))
    bad = [leave(url, i, dice) for i in range(dice.randrange(120))]
    bad += [read_slowly(url, i, dice) for i in range(dice.randrange(8))]
    bad += [stay_silent(url, dice.random() * 2) for _ in range(dice.randrange(60))]
    texts, *_ = await asyncio.gather(asyncio.gather(*(text_of(client, i) for i in range(num))), *bad)
    for i, text in enumerate(texts):
        assert text == alone[i % NUM_ANSWERS], f"answer {i} is {text!r}, alone it is {alone[i % NUM_ANSWERS]!r}"
    until = time.monotonic() + PATIENCE
    while left := await in_use(client):
        assert time.monotonic() < until, f"left after the wave: {left} {(await client.get('/requests')).text}"
        await asyncio.sleep(0.05)
    return num


async def storm(url: str, pid: int, seconds: float, seed: int) -> None:
    dice, begin = random.Random(seed), time.monotonic()
    before = served = 0
    async with client_of(url) as client:
        alone = [await text_of(client, i) for i in range(NUM_ANSWERS)]
        for i in count(1):
            served += await wave(url, client, alone, dice)
            elapsed, memory = time.monotonic() - begin, memory_of(pid)
            print(f"{elapsed:7.0f} s  wave {i:4}  {served:8} answers  {memory / 1e6:7.1f} MB", flush=True)
            if not before and elapsed > WARM_UP * seconds:
                before = memory
            if before:
                assert memory - before < MOST_GROWTH, f"memory grew from {before} to {memory} bytes"
            if elapsed > seconds:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryDirectory() as folder:
        model = write_talking_model(Path(folder) / "talker")
        # A small KV pool, whose memory is all in use before memory is compared.
        limits = ("--max-model-len", "2048", "--max-requests", "4096", "--receive-timeout", "5", "--kv-cache-bytes", KV)
        with start("serve", model, "--port", "0", *limits) as process:
            try:
                line = process.stderr.readline().decode()
                assert " at http" in line, line + process.stderr.read().decode()
                asyncio.run(storm(line.split()[-1], process.pid, 60 * options.minutes, options.seed))
            except AssertionError as error:
                sys.exit(f"seed {options.seed}: {error}")
            finally:
                process.terminate()
    print("no violation")


if __name__ == "__main__":
    main()
