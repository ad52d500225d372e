"""`foreword serve` with a prefix cache on disk, killed at random moments under load: after a restart, equal answers.

    PYTHONPATH=src:tests:tests/cli python tests/storms/restart_storm.py --runs 30 --model smollm2
    PYTHONPATH=src:tests:tests/cli python tests/storms/restart_storm.py --runs 30 --replicas 2

In each run clients ask for prompts with common beginnings until the server is killed; with replicas, until one of them
is, which the server starts again. Then every prompt has the answer of a server without a cache. Ends with 1 at the
first wrong answer.
"""

import argparse
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import kill
from pathlib import Path
from random import Random

import httpx
from processes import start

WORDS = [f"{a}{b}" for a in ("ri", "mo", "ka", "te", "su") for b in ("ver", "on", "lin", "ra", "to")]
PATIENCE = 60.0
ENGINE = ("--max-model-len", 2048, "--max-num-seqs", 4, "--max-num-batched-tokens", 256, "--kv-cache-bytes", "64MiB")


def prompts_of(random: Random, count: int = 6, words: int = 200) -> list[str]:
    """Return texts of which each has one of two beginnings."""
    beginnings = [" ".join(random.choices(WORDS, k=words)) for _ in range(2)]
    return [f"{random.choice(beginnings)} {' '.join(random.choices(WORDS, k=words // 4))}" for _ in range(count)]


class Server:
    """A process of the server, with a client of it."""

    def __init__(self, model: str, *options: object) -> None:
        self.process = start("serve", model, "--port", 0, *ENGINE, *options)
        line = ""
        while (url := re.search(r"http://[\w.:]+", line)) is None:
            line = self.process.stderr.readline().decode()
            assert line, "the server did not start"
        self.client = httpx.Client(base_url=url[0], timeout=PATIENCE, trust_env=False)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # it never waits for a reader

    def ask(self, prompt: str) -> tuple[str, int]:
        """Return the answer to a prompt, and how many of its tokens came from the disk."""
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        loaded = answer["usage"]["prompt_tokens_details"].get("loaded_tokens", {})
        return answer["choices"][0]["text"], sum(loaded.values())

    @contextmanager
    def asked(self, prompts: list[str], random: Random) -> Iterator[threading.Event]:
        """Ask again and again within the block, in two threads. Requests may fail there. Yields an event that is set by
        the first answer.
        """
        is_over, has_answered = threading.Event(), threading.Event()

        def client(own: Random) -> None:
            while not is_over.is_set():
                with suppress(httpx.HTTPError, AssertionError):
                    self.ask(own.choice(prompts))
                    has_answered.set()

        threads = [threading.Thread(target=client, args=(Random(random.random()),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield has_answered
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def replicas(self) -> list[int]:
        """Return the ids of its processes of its own."""
        pid = self.process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def wait_until_ready(self, count: int) -> None:
        until = time.monotonic() + PATIENCE
        while len(self.client.get("/ready").json().get("replicas", ())) < count:
            assert time.monotonic() < until, self.client.get("/ready").text
            time.sleep(0.1)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.client.close()
        with suppress(ProcessLookupError):  # it was killed
            self.process.send_signal(number)
        with self.process:
            self.process.wait(PATIENCE)


def storm(model: str, runs: int, seed: int, num_replicas: int, folder: Path) -> int:
    """Return how many prompt tokens came from the disk. Raise AssertionError for a wrong answer."""
    random, total = Random(seed), 0
    alone = Server(model)
    options = "--cache-dir", folder, "--cache-bytes", "48MiB"
    server = Server(model, *options, "--replicas", num_replicas) if num_replicas > 1 else Server(model, *options)
    try:
        for run in range(runs):
            prompts = prompts_of(random)
            expected = [alone.ask(prompt)[0] for prompt in prompts]
            with server.asked(prompts, random) as has_answered:
                assert has_answered.wait(PATIENCE)
                time.sleep(random.random())
                if num_replicas > 1:
                    kill(random.choice(server.replicas()), signal.SIGKILL)
                else:
                    server.process.kill()
            if num_replicas > 1:
                server.wait_until_ready(num_replicas)
            else:
                server.end(signal.SIGKILL)
                server = Server(model, *options)
            found = [server.ask(prompt) for prompt in prompts]
            assert [text for text, _ in found] == expected, f"run {run} of seed {seed}: {found} is not {expected}"
            total += sum(loaded for _, loaded in found)
            print(f"run {run}: {sum(loaded for _, loaded in found)} tokens from the disk", flush=True)
    finally:
        server.end()
        alone.end()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        total = storm(given.model, given.runs, given.seed, given.replicas, Path(folder))
    print(f"{given.runs} kills: every answer is right; {total} prompt tokens came from the disk")
    sys.exit(0 if total else 1)


if __name__ == "__main__":
    main()
