"""Estimate which replicas have the keys and values of a prompt: a bounded memory of where prompts were sent."""

from __future__ import annotations

from collections.abc import Sequence

MAX_HOLDERS = 8  # replicas remembered per piece, the latest ones
TEXT_PIECE = 512  # characters of a piece of text


class PrefixIndex:
    """Pieces of prompts → the replicas that computed them last; the last capacity / 2 to ``capacity`` pieces.

    A prompt is a sequence of names of pieces; a name stands for the piece and all pieces before it.
    """

    def __init__(self, capacity: int) -> None:
        self._half = max(capacity // 2, 1)
        self._new: dict[int, tuple[int, ...]] = {}
        self._old: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def matches(self, pieces: Sequence[int]) -> dict[int, int]:
        """Replica → leading pieces that it has, for those with at least one."""
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
        """The replica computes these pieces now."""
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
        """The replica has lost what it had."""
        for part in (self._new, self._old):
            for piece in [piece for piece, known in part.items() if replica in known]:
                part[piece] = tuple(r for r in part[piece] if r != replica)
            for piece in [piece for piece, known in part.items() if not known]:
                del part[piece]


def text_prefix(text: str, *, size: int = TEXT_PIECE) -> list[int]:
    """The pieces of a text, for this process: one name per ``size`` characters, the last ones cut off."""
    names, before = [], 0
    for at in range(0, len(text) - size + 1, size):
        before = hash((before, text[at : at + size]))
        names.append(before)
    return names
