"""A server of several models for minutes: they load and unload under load, every answer is checked, memory stays flat.

    PYTHONPATH=src:tests:tests/cli python tests/server/soak_models.py --minutes 5 [--seed 3]

`foreword serve` runs in a process of its own, with five models, memory for two and a short time of idleness. Clients
ask for models at random, as a whole and in streams; some leave at any moment. A violation ends the program with 1.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from processes import start
from soak import MOST_GROWTH, WARM_UP, memory_of
from talking_model import write_talking_model

NAMES = "abcde"
ENGINE = ("--max-model-len", 512, "--max-num-seqs", 16, "--kv-cache-bytes", 1 << 20, "--max-num-batched-tokens", 64)
BUDGET = 2_800_000  # enough for two models
CLIENTS = 12


def body(name: str, stream: bool) -> dict:
    return {"model": name, "prompt": f"model {name}", "max_tokens": 40, "temperature": 0, "stream": stream}


async def answer(client: httpx.AsyncClient, name: str) -> str:
    response = await client.post("/v1/completions", json=body(name, False))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def ask(client: httpx.AsyncClient, name: str, expected: str, dice: random.Random) -> None:
    kind = dice.random()
    if kind < 0.6:
        assert await answer(client, name) == expected, name
    elif kind < 0.8:
        async with client.stream("POST", "/v1/completions", json=body(name, True)) as response:
            text = "".join([line async for line in response.aiter_text()])
        assert response.status_code == 200, text
        assert text.rstrip().endswith("[DONE]"), text
    else:  # a client that leaves
        try:
            async with asyncio.timeout(dice.random() * 0.3):
                await answer(client, name)
        except TimeoutError:
            pass


async def soak(url: str, pid: int, minutes: float, seed: int) -> None:
    dice, asked = random.Random(seed), Counter()
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        expected = {name: await answer(client, name) for name in NAMES}
        begin, until, before, shown = time.monotonic(), time.monotonic() + 60 * minutes, 0, 0.0

        async def run() -> None:
            while time.monotonic() < until:
                name = dice.choice(NAMES)
                await ask(client, name, expected[name], dice)
                asked[name] += 1
                await asyncio.sleep(dice.choice((0, 0, 0, 0.3)))  # some models become idle

        tasks = [asyncio.create_task(run()) for _ in range(CLIENTS)]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=5.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            memory = memory_of(pid)
            if not before and time.monotonic() - begin > WARM_UP * 60 * minutes:
                before = memory
            if time.monotonic() - shown > 15.0:
                shown = time.monotonic()
                print(f"{shown - begin:5.0f} s: {asked.total()} requests, {memory >> 20} MiB", flush=True)
        page = (await client.get("/metrics")).text
        loads = sum(float(count) for count in re.findall(r"^foreword:model_loads_total{.*} (\S+)$", page, re.MULTILINE))
        assert re.search(r"^foreword:requests_waiting_for_models 0.0$", page, re.MULTILINE), "a request is left"
        print(f"{asked.total()} requests, {loads:.0f} loads, {(memory - before) / 2**20:+.1f} MiB after the warm-up")
        assert loads > 2 * len(NAMES), loads
        assert memory < before + MOST_GROWTH, f"memory grew by {memory - before} bytes"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(NAMES):
            write_talking_model(Path(folder) / name, 512 + i)
        settings = ("--load-on-demand", "--ram-budget", BUDGET, "--model-keep-alive", 0.2, "--port", 0)
        process = start("serve", "--models-dir", folder, *settings, *ENGINE)
        try:
            line = process.stderr.readline().decode()
            url = re.search(r"http://\S+", line)
            assert url, line + process.stderr.read().decode()
            asyncio.run(soak(url[0], process.pid, given.minutes, given.seed))
        finally:
            process.terminate()
            with process:
                process.wait(60)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
