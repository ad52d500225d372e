"""A server as a process, alone or with two replicas, and what it answers to bytes."""

import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple, Self

from processes import PATIENCE, start

OWN = "http://localhost"
MAX_BODY, MAX_HEAD, RECEIVE_SECONDS = 200_000, 4000, 4
SETTINGS = (
    *("--port", 0, "--served-model-name", "tiny", "--max-model-len", 512),
    *("--kv-cache-bytes", 16 << 20, "--api-key", "one", "--api-key", "two", "--admin-key", "root"),
    *("--cors-origin", "https://a.b", "--allowed-host", "models.example", "--drain-timeout", 5),
    "--no-store-responses",
    *("--max-body-bytes", MAX_BODY, "--max-header-bytes", MAX_HEAD, "--receive-timeout", RECEIVE_SECONDS),
)


class Answer(NamedTuple):
    """A response. headers: by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lasting(self) -> tuple[int, Mapping[str, str], bytes]:
        """Return the part that does not depend on the time or the id of the request."""
        passing = ("date", "x-request-id", "content-length", "connection")
        headers = {name: value for name, value in self.headers.items() if name not in passing}
        return self.status, headers, re.sub(rb"[0-9a-f]{32}|\"created(_at)?\":(\d+|\"[^\"]*\")", b"", self.body)


def head(method: str | bytes, target: str | bytes, *lines: str | bytes, host: str | bytes = "localhost") -> bytes:
    """The head of a request, whose lines are sent as they are."""
    first = b"%s %s HTTP/1.1" % (as_bytes(method), as_bytes(target))
    return b"\r\n".join((first, b"Host: " + as_bytes(host), *map(as_bytes, lines), b"", b""))


def as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


class Wire:
    """A running server. log: what it wrote on standard error."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process, self.log = process, list[str]()
        line = process.stderr.readline().decode()
        assert " at http://" in line, line + process.stderr.read().decode()
        self.port = int(re.search(r"http://[^:]+:(\d+)", line)[1])
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        self.log.extend(line.decode() for line in self._process.stderr)

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as found:
            yield found

    def raw(self, *parts: bytes) -> bytes:
        """Send everything, then return what is answered until the server closes the connection. A connection that is
        reset before all is sent and read raises an OSError.
        """
        with self.connection() as connection:
            for part in parts:
                connection.sendall(part)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def exchange(self, parts: Iterable[bytes]) -> tuple[bytes, int]:
        """Send parts until the server closes the connection. Return what it answered, and the bytes that were sent."""
        answer, sent = [], 0
        with self.connection() as connection:
            reader = threading.Thread(target=_read_all, args=(connection, answer))
            reader.start()
            try:
                for part in parts:
                    connection.sendall(part)
                    sent += len(part)
            except OSError:
                pass
            else:
                connection.shutdown(socket.SHUT_WR)
            reader.join()
        return b"".join(answer), sent

    def ask(
        self,
        method: str,
        target: str | bytes,
        body: bytes | None = None,
        *lines: str | bytes,
        key: str | None = "root",
        kind: str | None = "application/json",
        host: str | bytes = "localhost",
    ) -> Answer:
        """Send one request. lines: more of its head."""
        given = [*lines, "Connection: close"]
        given += [] if key is None else [f"Authorization: Bearer {key}"]
        if body is not None:
            given += [f"Content-Length: {len(body)}", *([] if kind is None else [f"Content-Type: {kind}"])]
        return parsed(self.raw(head(method, target, *given, host=host) + (body or b"")), method)[0]

    def end(self) -> None:
        """End the server, which must not have failed."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE) == 0, self.log
        self._reader.join(PATIENCE)
        assert all(line.startswith("foreword: ") for line in self.log), "".join(self.log)


def _read_all(connection: socket.socket, answer: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            answer.append(part)


class _Source:
    """The file that `HTTPResponse` reads, which stays open for the next response."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, mode: str) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None: ...


def parsed(data: bytes, method: str = "GET") -> list[Answer]:
    """The responses in what a server sent; those to HEAD have no body."""
    found, file = [], io.BufferedReader(io.BytesIO(data))
    while file.peek(1):
        response = HTTPResponse(_Source(file), method=method)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        found.append(Answer(response.status, headers, response.read()))
    return found


@contextmanager
def wires(model: Path) -> Iterator[dict[str, Wire]]:
    """One server, and one with two replicas, which are started together."""
    processes = {name: start("serve", model, *SETTINGS, "--replicas", n) for name, n in (("one", 1), ("replicas", 2))}
    try:
        found = {name: Wire(process) for name, process in processes.items()}
        yield found
        for wire in found.values():
            wire.end()
    finally:
        for process in processes.values():
            process.kill()
            with process:
                process.wait()
