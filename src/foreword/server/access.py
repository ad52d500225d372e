"""Who may use which operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hmac import compare_digest

from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
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
        """HttpError 401 without a valid key. headers: by lower-case names."""
        needed = self.needed(access)
        keys = self._admin if needed == "admin key" else self._ordinary
        if needed is not None and not _is_one_of(_given(headers), keys):
            raise HttpError(
                401,
                f"{path} needs the {needed}: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in OpenAI's header or in Anthropic's."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _is_one_of(key: bytes, keys: Iterable[bytes]) -> bool:
    return sum(compare_digest(key, known) for known in keys) > 0
