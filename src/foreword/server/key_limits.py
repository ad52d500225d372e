"""Limits of each API key: its share of the model, its requests at the same time, and its tokens per minute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from math import ceil

from foreword.names import advice
from foreword.server.errors import HttpError
from foreword.server.failures import KEY_LIMIT

_FORM = re.compile(r"(?P<key>\S.*?)(?P<limits>(?:\s+\w+=\S*)+)")
_HEX = re.compile("[0-9a-f]{64}")


DIGEST = "sha256:"
"""Stands before a digest in place of a key."""


def digest_of(key: bytes) -> str:
    """Return what stands for a key wherever it is kept."""
    return sha256(key).hexdigest()


def key_digest(key: str) -> str:
    """Return the digest of a key that may be given as one."""
    return key.removeprefix(DIGEST) if key.startswith(DIGEST) else digest_of(key.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """share: the weight of a key under the fair policy. requests: completions at the same time; tokens_per_minute: of
    prompts and outputs; None: no limit.
    """

    share: float = 1.0
    requests: int | None = None
    tokens_per_minute: int | None = None

    def of_replica(self, num_replicas: int) -> KeyLimits:
        """Return the part that one of several replicas has of the limits. What it refuses, another one may take."""
        parts = {
            name: None if whole is None else ceil(whole / num_replicas)
            for name, whole in (("requests", self.requests), ("tokens_per_minute", self.tokens_per_minute))
        }
        return replace(self, **parts)  # type: ignore[arg-type]

    def written(self, key: str) -> str:
        """Return the text that `read_limit` reads, with the digest of the key."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        words = (f"{name}={value}" for name, value in given.items() if value is not None)
        return " ".join([DIGEST + key_digest(key), *words])


NO_LIMITS = KeyLimits()


def read_limit(text: str) -> tuple[str, KeyLimits]:
    """Return the key and the limits of ``KEY share=2 requests=4 tokens_per_minute=60000``. Raise ValueError for another
    form.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("give a key and its limits, such as KEY share=2 requests=4 tokens_per_minute=60000")
    if found["key"].startswith(DIGEST) and not _HEX.fullmatch(found["key"], len(DIGEST)):
        raise ValueError(f"{DIGEST}: give the 64 hexadecimal digits of the key's SHA-256 in lower case behind it")
    known = [field.name for field in fields(KeyLimits)]
    values: dict[str, float] = {}
    for word in found["limits"].split():
        name, _, number = word.partition("=")
        if name not in known or name in values:
            raise ValueError(f"{name}: is given twice" if name in values else advice(name, known, f"Give {known}"))
        try:
            value = float(number) if name == "share" else int(number)
        except ValueError:
            value = 0
        if not (2**-10 <= value <= 2**10 if name == "share" else 1 <= value < 2**31):
            allowed = "a number from 1/1024 to 1024" if name == "share" else "a whole number above 0"
            raise ValueError(f"{name}: must be {allowed}")
        values[name] = value
    return found["key"], KeyLimits(**values)  # type: ignore[arg-type]


class _Use:
    """The current use of one key. level: tokens that it may have, which come back with the time; below 0: it waits."""

    __slots__ = ("level", "num_requests", "since")

    def __init__(self, level: float) -> None:
        self.num_requests, self.level, self.since = 0, level, 0.0


class KeyUses:
    """Counts what the keys with limits use. limits: with the keys that have them."""

    def __init__(self, limits: Iterable[tuple[str, KeyLimits]], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits: Mapping[str, KeyLimits] = {key_digest(key): own for key, own in limits}
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def share(self, key: str) -> float:
        """Return the share of a key, given by its digest."""
        return self._limits.get(key, NO_LIMITS).share

    def enter(self, key: str, num_requests: int) -> Callable[[], None]:
        """Count completions that begin, and return what counts their end. Raise HttpError 429 if a limit is reached;
        one request with more completions than the limit is served alone.
        """
        limits = self._limits.get(key, NO_LIMITS)
        use = self._use(key, limits)
        if limits.requests is not None and 0 < use.num_requests > limits.requests - num_requests:
            count = f"{use.num_requests} completions of your key are in progress"
            self._refuse(f"{count}, of requests={limits.requests}", 1)
        if limits.tokens_per_minute is not None and not self.has_tokens(key):
            wait = ceil(-use.level * 60 / limits.tokens_per_minute)
            self._refuse(f"your key has used its tokens_per_minute={limits.tokens_per_minute}", max(wait, 1))
        use.num_requests += num_requests

        def leave() -> None:
            use.num_requests -= num_requests
            if not use.num_requests and limits.tokens_per_minute is None:
                self._uses.pop(key, None)

        return leave

    def has_tokens(self, key: str) -> bool:
        """Return whether a key has tokens left."""
        limits = self._limits.get(key, NO_LIMITS)
        return limits.tokens_per_minute is None or self._use(key, limits).level >= 0

    def add_tokens(self, key: str, count: int) -> None:
        """Count tokens that a key has used. A request that began may use more than is left: later ones wait for it."""
        limits = self._limits.get(key, NO_LIMITS)
        if limits.tokens_per_minute is not None:
            self._use(key, limits).level -= count

    def _use(self, key: str, limits: KeyLimits) -> _Use:
        most, now = limits.tokens_per_minute or 0, self._clock()
        use = self._uses.setdefault(key, _Use(most))
        use.level, use.since = min(most, use.level + most * (now - use.since) / 60), now
        return use

    def _refuse(self, reason: str, wait: int) -> None:
        raise HttpError(KEY_LIMIT, f"{reason}. Try again", headers={"Retry-After": str(wait)})
