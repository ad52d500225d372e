"""Who may use which operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hmac import compare_digest
from ipaddress import ip_address

from foreword.server.client import given_key
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID_API_KEY, UNKNOWN_HOST
from foreword.server.operation import Access


class Keys:
    """Checks the keys of requests, in a time that does not depend on how much of a key is right."""

    def __init__(self, config: ServerConfig) -> None:
        self._admin = () if config.admin_key is None else (config.admin_key.encode(),)
        self._ordinary = (*(key.encode() for key in config.api_key), *self._admin) if config.api_key else ()

    def needed(self, access: Access) -> str | None:
        """Return the kind of key that an operation needs: "admin key", "API key" or None."""
        if self._admin and access == "admin":
            return "admin key"
        return "API key" if self._ordinary and access != "public" else None

    def check(self, access: Access, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError 401 without a valid key. The names of ``headers`` are in lower case."""
        needed = self.needed(access)
        keys = self._admin if needed == "admin key" else self._ordinary
        if needed is not None and not _is_one_of(given_key(headers), keys):
            raise HttpError(
                INVALID_API_KEY,
                f"{path} needs the {needed}: send the header Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )


class Hosts:
    """Checks the name that a request calls the server by.

    Any web page can call a server on its visitor's own machine, by a name of the page's that leads to 127.0.0.1. Such
    requests have this name in their Host header, and would be answered if no key is needed.
    """

    def __init__(self, config: ServerConfig) -> None:
        names = {name.lower() for name in config.allowed_host}
        is_open = is_loopback(config.host) and not config.api_key
        self._names = names | {"localhost", config.host.lower()} if names or is_open else {"*"}

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError 421 for a name that is not allowed. Numeric addresses are, and requests of HTTP/1.0 without
        one.
        """
        given = headers.get(b"host", b"").decode("latin-1").lower()
        name = given.rpartition(":")[0] if given.rpartition(":")[2].isdigit() else given
        if "*" in self._names or not name or name in self._names or _is_address(name.strip("[]")):
            return
        reason = f"Host {name!r:.80} is not a name of this server; it is allowed by --allowed-host"
        raise HttpError(UNKNOWN_HOST, reason)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_one_of(key: bytes, keys: Iterable[bytes]) -> bool:
    return sum(compare_digest(key, known) for known in keys) > 0
