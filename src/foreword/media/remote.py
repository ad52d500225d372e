"""Fetch files of other machines, within limits of hosts, size and time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Timer
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from foreword.errors import RequestError
from foreword.media.limits import MediaLimits

CHUNK = 1 << 16
PORTS = {"http": 80, "https": 443}


def fetch(field: str, url: str, limits: MediaLimits) -> bytes:
    """Return the content of an http(s) URL, at most one byte more than ``max_bytes``.

    Raise RequestError if the host of the URL or of a redirect is not allowed, or if reading takes longer than
    ``timeout`` in total.
    """
    deadline = time.monotonic() + limits.timeout
    try:
        _check(field, url, limits)
        found = bytearray()
        with _sockets_until(limits.timeout) as sockets:
            opener = build_opener(ProxyHandler({}), _Redirects(field, limits), _Opener(sockets))
            with opener.open(url, timeout=limits.timeout) as response:
                while len(found) <= limits.max_bytes and (chunk := response.read1(CHUNK)):
                    found += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        return bytes(found[: limits.max_bytes + 1])
    except RequestError:
        raise
    except (OSError, ValueError, HTTPException) as error:
        late = time.monotonic() > deadline
        reason = f"cannot be fetched ({f'took longer than {limits.timeout} s' if late else f'{error!s:.200}'})"
        raise RequestError(None, field, url[:200], reason, "Check the URL, or give a data: URL.") from None


@contextmanager
def _sockets_until(seconds: float) -> Iterator[list[socket.socket]]:
    """Within the block, give a list of sockets that are shut down after some seconds, which ends every read from
    them.
    """
    sockets: list[socket.socket] = []

    def shut_down() -> None:
        for one in list(sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield sockets
    finally:
        timer.cancel()


class _Connection(HTTPConnection):
    """A connection that adds its socket to the list."""

    sockets: list[socket.socket]

    def connect(self) -> None:
        super().connect()
        self.sockets.append(self.sock)


class _SecureConnection(HTTPSConnection, _Connection):
    """A connection with TLS that adds its socket to the list before and after the handshake."""

    def connect(self) -> None:
        super().connect()
        self.sockets.append(self.sock)


class _Opener(HTTPHandler, HTTPSHandler):
    """Open connections that add their sockets to the list."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__()
        self._sockets = sockets

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, _Connection), req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, _SecureConnection), req)

    def _connection(self, kind: type[_Connection], *args: Any, **options: Any) -> _Connection:
        connection = kind(*args, **options)
        connection.sockets = self._sockets
        return connection


class _Redirects(HTTPRedirectHandler):
    """Follow redirects only to allowed hosts."""

    max_redirections = 3

    def __init__(self, field: str, limits: MediaLimits) -> None:
        self._field, self._limits = field, limits

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check(self._field, newurl, self._limits)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(field: str, url: str, limits: MediaLimits) -> None:
    """Raise RequestError unless the host is allowed: by its name if the port is the scheme's default, or by name and
    port.
    """
    parts = urlsplit(url)
    host, usual = parts.hostname or "", PORTS.get(parts.scheme)
    port = usual if parts.port is None else parts.port
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if usual is not None and (place in limits.remote_hosts or (port == usual and host in limits.remote_hosts)):
        return
    hosts = ", ".join(limits.remote_hosts)
    reason = f"files are fetched from {hosts} only" if hosts else "files are not fetched from other machines"
    raise RequestError(None, field, url[:200], reason, "Give a data: URL.")
