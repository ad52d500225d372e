"""A server of two replicas, as a process, and what a test asks it."""

import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from processes import MAIN, start
from prometheus_client.parser import text_string_to_metric_families

READY = re.compile(rb"foreword: (\S+) at (http://\S+), 2 replicas")
PATIENCE = 60.0
QUICK_PROBES = f"""
from foreword.cluster import cluster, process
cluster.PROBE_INTERVAL, process.PROBE_SECONDS = 0.5, 3.0
{MAIN}"""
"""The server, which notices a replica that hangs in a few seconds."""


class Served:
    """A running server of two replicas."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process, self.url = process, url
        self.notes: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.notes.extend(line.decode() for line in self.process.stderr)

    def close(self) -> None:
        self._reader.join(PATIENCE)

    def client(self) -> httpx.Client:
        headers = {"Authorization": "Bearer key"}
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, headers=headers)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: object) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def complete(self, prompt: str, **body) -> httpx.Response:
        given = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
        return self.post("/v1/completions", given)

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of a metric by replica, summed over its other labels."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels["replica"]] += sample.value
        return dict(found)

    def replicas(self) -> list[int]:
        """The processes that serve."""
        return [int(pid) for pid in self.metrics("foreword:replica_pid").values()]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, self.notes
            time.sleep(0.05)


@contextmanager
def serving(*arguments: object, keys: tuple[str, ...] = ("--api-key", "key")) -> Iterator[Served]:
    given = *arguments, "--replicas", 2, "--port", 0, *keys, "--num-threads", 1
    process = start("serve", *given, program=QUICK_PROBES)
    try:
        line = process.stderr.readline()
        found = READY.match(line)
        assert found, line + process.stderr.read()
        served = Served(process, found[2].decode())
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, served.notes
        served.close()
    finally:
        process.kill()
        with process:
            process.wait()


LONG = {"max_tokens": 90000, "stream": True, "ignore_eos": True}
