"""Who may use which operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import NamedTuple

from starlette.types import Scope

from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID_API_KEY, UNKNOWN_HOST
from foreword.server.operation import Access

CLIENT = b"x-foreword-client"
NOTHING = "-"  # stands in that header for no key, or no address


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
        """HttpError 401 without a valid key. headers: by lower-case names."""
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
        """HttpError 421 for a name that is not allowed. Numeric addresses are, and requests of HTTP/1.0 without one."""
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


class Client(NamedTuple):
    """What tells the client of a request from others. key: a digest of its key. address: of its machine."""

    key: str
    address: str

    @classmethod
    def of(cls, scope: Scope, config: ServerConfig) -> Client:
        """Return the client of a request. A front end, which has the admin key, tells whose request it passes on."""
        headers, address = dict(scope["headers"]), (scope.get("client") or ("",))[0]
        key, told = given_key(headers), headers.get(CLIENT)
        if told is not None and config.admin_key is not None and compare_digest(key, config.admin_key.encode()):
            return cls(*("" if word == NOTHING else word for word in told.decode("latin-1").split(" ")))
        return cls(sha256(key).hexdigest() if config.api_key else "", address)

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The header in which a front end tells it."""
        return CLIENT, f"{self.key or NOTHING} {self.address or NOTHING}".encode("latin-1", "replace")


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key in OpenAI's header or in Anthropic's."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _is_one_of(key: bytes, keys: Iterable[bytes]) -> bool:
    return sum(compare_digest(key, known) for known in keys) > 0
