"""Incremental text of a completion: whole characters only, and no beginning of a possible stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental decoding. `push` returns only whole characters; `finish` returns the rest."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """The text of one completion.

    pieces: everything released so far. A beginning of a stop string at the end of the text
    is held back until the next token decides. The cost is O(new text).
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_stops", "pieces", "stop")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self.pieces: list[str] = []
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token_ids: Sequence[int], *, may_stop: bool = True) -> bool:
        """Add tokens. True when a stop string is complete; the text then ends before it, or after it if included."""
        new = self._detokenizer.push(token_ids)
        return self._take(new, may_stop) if new else False

    def finish(self) -> None:
        """End of the output: release the text held back."""
        self._release(self._held + self._detokenizer.finish())
        self._held = ""

    def _take(self, new: str, may_stop: bool) -> bool:
        text = self._held + new
        self._held = ""
        if self._stops and may_stop:
            # Released text cannot be part of a match: the beginnings of stop strings were held back.
            found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                at, self.stop = min(found, key=lambda match: match[0] + len(match[1]))
                text = text[: at + len(self.stop)] if self._include_stop else text[:at]
                self._release(text)
                return True
        if self._stops:
            held = max(_overlap(text, stop) for stop in self._stops)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self._release(text)
        return False

    def _release(self, text: str) -> None:
        if text:
            self.pieces.append(text)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
