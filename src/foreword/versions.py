"""Remember values between steps until their owners change: versions of owners, and memos of what was made.

An owner of values that change has a ``version``, an integer that grows with every change. A `Memo` keeps what was made
from the values of its owners, and forgets it when one of their versions has grown. docs/remembered.md lists them.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Versioned(Protocol):
    """An owner of values that change."""

    @property
    def version(self) -> int:
        """An integer that grows with every change."""


class Memo(Generic[K, V]):
    """The last value made for a key, until one of its owners changes.

    Keys are compared by identity, so a key is a value that never changes: parameters, needs, an array that is replaced
    and not written. owners: what the value depends on besides its key. size: keys; one more replaces the oldest.
    """

    __slots__ = ("_entries", "_owners", "_size")

    def __init__(self, *owners: Versioned, size: int = 1) -> None:
        self._owners, self._size = owners, size
        self._entries: list[_Entry[K, V]] = []  # the oldest first

    def find(self, key: K) -> V | None:
        """Return what was kept for the key; None if nothing was, or if it is forgotten."""
        for entry in self._entries:
            if entry.key is key and entry.uses:
                for owner, version in entry.versions:
                    if owner.version != version:
                        return None
                entry.uses -= 1
                return entry.value
        return None

    def keep(self, key: K, value: V, uses: int = -1) -> V:
        """Store a value for the key, and return it. uses: the number of times that it can be found; −1: no limit."""
        versions = tuple((owner, owner.version) for owner in self._owners)
        others = [entry for entry in self._entries if entry.key is not key]
        self._entries = [*others, _Entry(key, value, versions, uses)][-self._size :]
        return value

    def forget(self) -> None:
        """Forget what was kept for every key."""
        self._entries = []


class _Entry(Generic[K, V]):
    """A value with its key, the versions from which it was made, and the number of times that it can still be found."""

    __slots__ = ("key", "uses", "value", "versions")

    def __init__(self, key: K, value: V, versions: tuple[tuple[Versioned, int], ...], uses: int) -> None:
        self.key, self.value, self.versions, self.uses = key, value, versions, uses
