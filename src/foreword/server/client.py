"""Who sent a request."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest
from typing import NamedTuple

from starlette.types import Scope

from foreword.server.config import ServerConfig
from foreword.server.key_limits import digest_of

CLIENT = b"x-foreword-client"
NOTHING = "-"  # stands in that header for no key, or no address


class Client(NamedTuple):
    """The identity of a request's client. key: a digest of its key. address: of its machine."""

    key: str
    address: str

    @classmethod
    def of(cls, scope: Scope, config: ServerConfig) -> Client:
        """Return the client of a request. A front end, which has the admin key, says whose request it forwards."""
        headers, address = dict(scope["headers"]), (scope.get("client") or ("",))[0]
        key, sender = given_key(headers), headers.get(CLIENT)
        if sender is not None and config.admin_key is not None and compare_digest(key, config.admin_key.encode()):
            return cls(*("" if word == NOTHING else word for word in sender.decode("latin-1").split(" ")))
        return cls(digest_of(key) if config.api_key else "", address)

    def is_same(self, other: Client) -> bool:
        """Return whether both have one key, or, without keys, one address."""
        return self.key == other.key and (self.key != "" or self.address == other.address)

    @property
    def owner(self) -> str:
        """The owner of the requests that it sends: its key or, without keys, its address."""
        return self.key or self.address

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The header in which a front end tells it."""
        return CLIENT, f"{self.key or NOTHING} {self.address or NOTHING}".encode("latin-1", "replace")


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key in OpenAI's header or in Anthropic's."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
