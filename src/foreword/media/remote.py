"""Files of other machines, within limits of hosts, size and time."""

from __future__ import annotations

import time
from typing import IO, Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from foreword.errors import RequestError
from foreword.media.limits import MediaLimits

CHUNK = 1 << 16


def fetch(field: str, url: str, limits: MediaLimits) -> bytes:
    """The content of an http(s) URL, at most one byte more than ``max_bytes``.

    RequestError if its host, or one that it redirects to, is not allowed, if it cannot be read, or takes too long.
    """
    deadline = time.monotonic() + limits.timeout
    opener = build_opener(ProxyHandler({}), _Redirects(field, limits))
    try:
        _check(field, url, limits)
        found = bytearray()
        with opener.open(url, timeout=limits.timeout) as response:
            while len(found) <= limits.max_bytes and (chunk := response.read1(CHUNK)):
                found += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"took longer than {limits.timeout} s")
        return bytes(found[: limits.max_bytes + 1])
    except RequestError:
        raise
    except (OSError, ValueError, URLError) as error:
        reason = f"cannot be fetched ({error!s:.200})"
        raise RequestError(None, field, url[:200], reason, "Check the URL, or give a data: URL.") from None


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to hosts that are allowed."""

    max_redirections = 3

    def __init__(self, field: str, limits: MediaLimits) -> None:
        self._field, self._limits = field, limits

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check(self._field, newurl, self._limits)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(field: str, url: str, limits: MediaLimits) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname not in limits.remote_hosts:
        hosts = ", ".join(limits.remote_hosts)
        reason = f"files are fetched from {hosts} only" if hosts else "files are not fetched from other machines"
        raise RequestError(None, field, url[:200], reason, "Give a data: URL.")
