"""Who may use which route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hmac import compare_digest

from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError

PUBLIC = frozenset(("/", "/health", "/ready"))
"""Paths that need no key: the chat page is the same for all, and asks for one."""

ADMIN = frozenset(("/abort", "/requests", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths that show or change what belongs to all: they need the admin key, if there is one."""


class Access:
    """Checks the keys of requests, in a time that does not depend on how much of a key is right."""

    def __init__(self, config: ServerConfig) -> None:
        self._admin = () if config.admin_key is None else (config.admin_key.encode(),)
        self._ordinary = (*(key.encode() for key in config.api_key), *self._admin) if config.api_key else ()

    def needed(self, path: str) -> str | None:
        """The kind of key that a path needs: "admin key", "API key" or None."""
        if self._admin and path in ADMIN:
            return "admin key"
        return "API key" if self._ordinary and path not in PUBLIC else None

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """HttpError 401 without a valid key. headers: by lower-case names."""
        needed = self.needed(path)
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
