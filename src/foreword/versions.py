"""Cache results between steps until the values from which they were computed change: versions and memos.

An owner of values that change has a ``version``, an integer that grows with every change. A `Memo` stores a result that
was computed from the values of its owners, until one of their versions has grown. docs/remembered.md lists all memos.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Versioned(Protocol):
    """An owner of values that change."""

    @property
    def version(self) -> int:
        """Return an integer that grows with every change."""


class Memo(Generic[K, V]):
    """The last value that was computed for a key, valid until one of its owners changes.

    Keys are compared by identity, so a key must be a value that never changes: parameters, needs, an array that is
    replaced instead of written. owners: the objects on which the value depends, besides its key. size: the number of
    keys; a further key replaces the oldest one.
    """

    __slots__ = ("_entries", "_owners", "_size")

    def __init__(self, *owners: Versioned, size: int = 1) -> None:
        self._owners, self._size = owners, size
        self._entries: list[_Entry[K, V]] = []  # the oldest entry first

    def find(self, key: K) -> V | None:
        """Return the stored value of the key; None if there is none, or if it is no longer valid."""
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
        """Remove the values of all keys."""
        self._entries = []


class _Entry(Generic[K, V]):
    """A value with its key, the versions from which it was made, and the number of times that it can still be found."""

    __slots__ = ("key", "uses", "value", "versions")

    def __init__(self, key: K, value: V, versions: tuple[tuple[Versioned, int], ...], uses: int) -> None:
        self.key, self.value, self.versions, self.uses = key, value, versions, uses
