"""Incremental text of a completion: whole characters only, and no beginning of a possible stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
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

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_left_out", "_sorted_stops", "_spans", "_stops",
                 "pieces", "stop")  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        """Begin with no text. ``left_out`` has the texts of tokens that are removed when text is released, so that stop
        strings can have them; the detokenizer writes these texts.
        """
        self._left_out = left_out or {}
        self._spans: list[tuple[int, int]] = []  # the places of such tokens, counted from the beginning of held text
        self._detokenizer = detokenizer
        self._stops, self._sorted_stops = tuple(stops), sorted(stops)
        self._include_stop = include_stop
        self.pieces: list[str] = []
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token_ids: Sequence[int], *, may_stop: bool = True) -> bool:
        """Add tokens. True when a stop string is complete; the text then ends before it, or after it if included."""
        if not self._left_out:
            new = self._detokenizer.push(token_ids)
            return self._take(new, may_stop) if new else False
        for token_id in token_ids:
            new = self._detokenizer.push((token_id,))
            if (text := self._left_out.get(token_id)) is not None:
                end = len(self._held) + len(new)
                self._spans.append((end - len(text), end))
            if new and self._take(new, may_stop):
                return True
        return False

    def finish(self) -> None:
        """End of the output: release the text held back."""
        self._release(self._held + self._detokenizer.finish())
        self._held = ""

    def _take(self, new: str, may_stop: bool) -> bool:
        text = self._held + new
        self._held = ""
        if self._stops and may_stop:
            # Released text cannot be part of a match: the beginnings of stop strings were held back.
            found = [(at, one) for one in self._stops if one in text and (at := self._find(text, one)) >= 0]
            if found:
                at, self.stop = min(found, key=lambda match: match[0] + len(match[1]))
                text = text[: at + len(self.stop)] if self._include_stop else text[:at]
                self._release(text)
                return True
        if self._stops:
            held = _overlap(text, self._sorted_stops)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self._release(text)
        return False

    def _find(self, text: str, stop: str) -> int:
        """Return the place of a stop string that has each token of ``left_out`` as a whole or not at all; else −1."""
        at = text.find(stop)
        while at >= 0 and any(
            begin < at + len(stop) and at < end and not at <= begin <= end <= at + len(stop)
            for begin, end in self._spans
        ):
            at = text.find(stop, at + 1)
        return at

    def _release(self, text: str) -> None:
        length = len(text)
        for begin, end in reversed(self._spans):
            text = text[: max(begin, 0)] + text[end:]
        self._spans = [(begin - length, end - length) for begin, end in self._spans if end > length]
        if text:
            self.pieces.append(text)


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest proper beginning of a stop string that ``text`` ends with. stops: sorted, so
    that those that begin with a text come right behind it.
    """
    longest = max(map(len, stops))
    for begin in range(max(len(text) - longest + 1, 0), len(text)):
        end = text[begin:]
        if (at := bisect_right(stops, end)) < len(stops) and stops[at].startswith(end):
            return len(end)
    return 0
