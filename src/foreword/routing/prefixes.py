"""Estimate which replicas have the keys and values of a prompt, from a bounded record of where prompts were sent."""

from __future__ import annotations

from collections.abc import Sequence

MAX_HOLDERS = 8  # replicas that are recorded per piece: the latest ones
TEXT_PIECE = 512  # characters per piece of text


class PrefixIndex:
    """A map from pieces of prompts to the replicas that computed them last. It keeps the last capacity / 2 to
    ``capacity`` pieces.

    A prompt is a sequence of names of pieces. A name identifies the piece together with all pieces before it.
    """

    def __init__(self, capacity: int) -> None:
        self._half = max(capacity // 2, 1)
        self._new: dict[int, tuple[int, ...]] = {}
        self._old: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def matches(self, pieces: Sequence[int]) -> dict[int, int]:
        """Return the number of leading pieces that each replica has, for replicas with at least one."""
        found: dict[int, int] = {}
        current: Sequence[int] = ()
        for n, piece in enumerate(pieces, 1):
            holders = self._new.get(piece) or self._old.get(piece, ())
            current = holders if n == 1 else [r for r in current if r in holders]
            if not current:
                break
            for replica in current:
                found[replica] = n
        return found

    def add(self, pieces: Sequence[int], replica: int) -> None:
        """Record that the replica computes these pieces."""
        alone = (replica,)
        for piece in pieces:
            known = self._new.get(piece)
            if known is None:
                known = self._old.pop(piece, alone)
            if known[-1] != replica:
                known = (*(r for r in known if r != replica), replica)[-MAX_HOLDERS:]
            self._new[piece] = known
        if len(self._new) > self._half:
            self._new, self._old = {}, self._new

    def forget(self, replica: int) -> None:
        """Record that the cache of the replica is empty."""
        for part in (self._new, self._old):
            for piece in [piece for piece, known in part.items() if replica in known]:
                part[piece] = tuple(r for r in part[piece] if r != replica)
            for piece in [piece for piece, known in part.items() if not known]:
                del part[piece]


def text_prefix(text: str, *, size: int = TEXT_PIECE) -> list[int]:
    """Return the names of the pieces of a text: one per ``size`` characters; an incomplete last piece is left out. The
    names are valid in this process.
    """
    names, before = [], 0
    for at in range(0, len(text) - size + 1, size):
        before = hash((before, text[at : at + size]))
        names.append(before)
    return names
