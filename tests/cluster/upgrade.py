"""A server replaced by one of another version while clients ask, and back again: `make upgrade`.

The other version is the last tag, or the parent of the newest commit, or that of the variable UPGRADE_FROM.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from processes import MAIN, SOURCE
from regression import builds

READY = re.compile(rb"foreword: \S+ at http://\S+:(\d+)")
PATIENCE = 60.0
PAUSE = 2.0
"""Seconds in which the old server reads the requests that were sent to it before the change."""
VERSIONS = {"old": "0.0.1", "new": "0.0.2"}
"""What each of the two servers says of itself. Two commits have mostly the same number."""
LENGTHS = 1, 20, 400
"""Tokens of the answers: the last one takes longer than the change of servers."""


@pytest.fixture(scope="session")
def old_sources() -> Path:
    return builds.checkout(os.environ.get("UPGRADE_FROM") or builds.default_base(), builds.DEFAULT_DIRECTORY)


class Proxy:
    """A reverse proxy: each connection goes to the server that is chosen when it is made."""

    def __init__(self) -> None:
        self.target = 0
        self.num_connections: Counter[int] = Counter()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            target = self.target
            self.num_connections[target] += 1
            server = socket.create_connection(("127.0.0.1", target))
            threading.Thread(target=_exchange, args=(client, server), daemon=True).start()

    def close(self) -> None:
        self._socket.close()


def _exchange(client: socket.socket, server: socket.socket) -> None:
    with client, server:
        answer = threading.Thread(target=_copy, args=(server, client), daemon=True)
        answer.start()
        _copy(client, server)
        answer.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def running(version: str, sources: Path | str, *arguments: object) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server of these sources, and its port."""
    program = f"import foreword; foreword.__version__ = {VERSIONS[version]!r}; {MAIN}"
    command = [sys.executable, "-c", program, "serve", *map(str, arguments), "--port", "0", "--num-threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(sources)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as process:
        try:
            line = process.stderr.readline()
            found = READY.match(line)
            assert found, line + process.stderr.read()
            threading.Thread(target=process.stderr.read, daemon=True).start()
            port = int(found[1])
            until = time.monotonic() + PATIENCE
            while httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False, timeout=60).status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.05)
            yield process, port
        finally:
            process.kill()


@pytest.mark.parametrize("replicas", [(), ("--replicas", 2)], ids=["alone", "replicas"])
def test_no_request_is_lost_by_an_upgrade_and_by_a_return(old_sources: Path, talker: Path, replicas: tuple):
    given = talker, "--served-model-name", "tiny", "--max-model-len", 2000, *replicas
    proxy, is_over = Proxy(), threading.Event()
    answers: Counter[str] = Counter()

    def ask(num_tokens: int) -> None:
        body = {"prompt": "c", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        while not is_over.is_set():
            try:
                answer = httpx.post(f"http://127.0.0.1:{proxy.port}/v1/completions", json=body, timeout=PATIENCE,
                                    trust_env=False)  # fmt: skip
                answers[f"{answer.status_code}, {answer.json()['usage']['completion_tokens']} of {num_tokens}"] += 1
            except Exception as error:
                answers[repr(error)] += 1

    threads = [threading.Thread(target=ask, args=(length,)) for length in LENGTHS for _ in range(2)]
    try:
        with running("old", old_sources, *given) as (old, old_port):
            told = httpx.get(f"http://127.0.0.1:{old_port}/version", trust_env=False, timeout=60)
            if not replicas:
                assert told.json() == {"version": VERSIONS["old"]}
            proxy.target = old_port
            for thread in threads:
                thread.start()
            _wait_for(proxy, old_port)
            with running("new", SOURCE, *given) as (new, new_port):
                _change(proxy, old, new_port)
                with running("old", old_sources, *given) as (_, back_port):
                    _change(proxy, new, back_port)
                    is_over.set()
                    for thread in threads:
                        thread.join(PATIENCE)
    finally:
        is_over.set()
        proxy.close()
    assert set(answers) == {f"200, {length} of {length}" for length in LENGTHS}
    assert len(proxy.num_connections) == 3


def _change(proxy: Proxy, before: subprocess.Popen, port: int) -> None:
    """Send new requests to another server, end the one before, and see that requests are answered afterwards."""
    proxy.target = port
    time.sleep(PAUSE)
    before.send_signal(signal.SIGTERM)
    assert before.wait(PATIENCE) == 0
    _wait_for(proxy, port)


def _wait_for(proxy: Proxy, port: int) -> None:
    until = time.monotonic() + PATIENCE
    while proxy.num_connections[port] < 20:
        assert time.monotonic() < until
        time.sleep(0.05)
