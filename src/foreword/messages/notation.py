"""Read values in JSON and similar notations piece by piece, and write them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Quotes:
    """The notation of a string. close: the text that ends it. escapes: the meaning of a backslash; "none" if it is an
    ordinary character.
    """

    close: str
    escapes: str = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The notation of values.

    quotes: the notations of strings, by their opening text. names_as_keys: keys are names without quotes. constants:
    words and their values in JSON. call_brackets: an object may also be written as the arguments of a call,
    ``(key=value, …)``.
    """

    quotes: Mapping[str, Quotes] = field(default_factory=lambda: {'"': Quotes('"')})
    names_as_keys: bool = False
    constants: Mapping[str, str] = field(default_factory=lambda: {"true": "true", "false": "false", "null": "null"})
    call_brackets: bool = False


JSON = Notation()
PYTHON = Notation(
    quotes={"'": Quotes("'", "python"), '"': Quotes('"', "python")},
    constants={"True": "true", "False": "false", "None": "null", **JSON.constants},
    call_brackets=True,
)

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\\\x00-\x1f\"]+")}
_ESCAPE = {
    "json": re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'),
    "python": re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL),
}
_LONGEST_ESCAPE = {"json": 6, "python": 10}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
MAX_WORD = 400  # most characters of a number or a name: more than a float64 needs
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[\w.+$-]+")
_CLOSE_OF = {"{": "}", "[": "]", "(": ")"}


class Status(Enum):
    """OPEN: more text is needed. DONE: the value is complete. BAD: the text does not follow the notation."""

    OPEN = auto()
    DONE = auto()
    BAD = auto()


class ValueReader:
    """Read one value: an object, a list, a string, a number or a constant.

    ``read`` consumes text up to the end of the value, or the first character that cannot belong to it, and appends the
    value as JSON text to ``written``. Text that is valid JSON is written unchanged, except for control characters in
    strings, which are escaped. The cost is O(text), at any depth. depth: the largest number of open brackets so far.
    """

    __slots__ = ("_expect", "_held", "_notation", "_quotes", "_stack", "depth", "status", "written")

    def __init__(self, notation: Notation = JSON) -> None:
        self._notation = notation
        self._stack: list[str] = []  # opening brackets
        self._expect: Callable[[str, int], int] = self._value
        self._held = ""  # the beginning of a word, a quote or an escape
        self._quotes: Quotes | None = None
        self.status = Status.OPEN
        self.depth = 0
        self.written: list[str] = []

    def read(self, text: str, at: int) -> int:
        """Continue in ``text`` at ``at``. Return the position after the consumed text."""
        end = len(text)
        while at < end and self.status is Status.OPEN:
            at = self._string(text, at) if self._quotes is not None else self._expect(text, at)
        return at

    def take_held(self) -> str:
        """Take the text that was consumed but not written, unchanged. It is used for a value that ends early."""
        held, self._held = self._held, ""
        return held

    def _value(self, text: str, at: int) -> int:
        if self._held and _WORD.fullmatch(self._held):
            return self._word(text, at)
        char = text[at]
        if not self._held:
            if char in " \t\r\n":
                return self._skip(text, at)
            if char in "{[" or (char == "(" and self._notation.call_brackets and not self._stack):
                self._stack.append(char)
                self.depth = max(self.depth, len(self._stack))
                self.written.append("{" if char == "(" else char)
                self._expect = self._first_item if char == "[" else self._first_key
                return at + 1
            if _WORD.match(char):
                return self._word(text, at)
        return self._quote(text, at)

    def _first_item(self, text: str, at: int) -> int:
        if text[at] == "]" and not self._held:
            return self._close(at)
        if text[at] not in " \t\r\n":
            self._expect = self._value
            return at
        return self._skip(text, at)

    def _first_key(self, text: str, at: int) -> int:
        if not self._held and text[at] == _CLOSE_OF[self._stack[-1]]:
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        named = self._notation.names_as_keys or self._stack[-1] == "("
        if not self._held and text[at] in " \t\r\n":
            return self._skip(text, at)
        if named and (_WORD.match(text[at]) if not self._held else _WORD.fullmatch(self._held)):
            word = _WORD.match(text, at)
            if word is not None:
                self._held += word[0]
                return word.end() if len(self._held) <= MAX_WORD else self._refuse(word.end())
            self.written.append(json.dumps(self._held, ensure_ascii=False))
            self._held = ""
            self._expect = self._colon
            return at
        if self._stack[-1] == "(":
            return self._refuse(at)
        self._expect = self._key
        return self._quote(text, at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ("=" if self._stack[-1] == "(" else ":"):
            self.written.append(":")
            self._expect = self._value
            return at + 1
        return self._skip(text, at) if text[at] in " \t\r\n" else self._refuse(at)

    def _after(self, text: str, at: int) -> int:
        """Read a character after an item of the innermost bracket."""
        char = text[at]
        if char == ",":
            self.written.append(",")
            self._expect = self._value if self._stack[-1] == "[" else self._key
            return at + 1
        if char == _CLOSE_OF[self._stack[-1]]:
            return self._close(at)
        return self._skip(text, at) if char in " \t\r\n" else self._refuse(at)

    def _close(self, at: int) -> int:
        self.written.append("]" if self._stack.pop() == "[" else "}")
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._expect = self._after
        if not self._stack:
            self.status = Status.DONE

    def _word(self, text: str, at: int) -> int:
        """Read a number or a constant. Only the next character shows where it ends."""
        word = _WORD.match(text, at)
        if word is not None and len(self._held) <= MAX_WORD:
            self._held += word[0]
            return word.end()
        written = self._notation.constants.get(self._held)
        if written is None and len(self._held) <= MAX_WORD and _NUMBER.fullmatch(self._held):
            written = self._held
        if written is None:
            return self._refuse(at)
        self._held = ""
        self.written.append(written)
        self._end_value()
        return at

    def _quote(self, text: str, at: int) -> int:
        """Read the opening quotes of a string, which may have several characters."""
        opening_text = self._held + text[at]
        if opening_text in self._notation.quotes:
            self._held = ""
            self._quotes = self._notation.quotes[opening_text]
            self.written.append('"')
        elif any(opening.startswith(opening_text) for opening in self._notation.quotes):
            self._held = opening_text
        else:
            return self._refuse(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        """Continue inside a string, and return the next place."""
        assert self._quotes is not None
        close, escapes = self._quotes.close, self._quotes.escapes
        if escapes == "none":
            return self._raw_string(text, at, close)
        if not self._held:
            run = _PLAIN[close].match(text, at)
            if run is not None:
                self.written.append(run[0])
                return run.end()
            if text[at] == close:
                self._end_string()
                return at + 1
            if text[at] != "\\":
                self.written.append(escaped(text[at]))
                return at + 1
        self._held += text[at]
        if _ESCAPE[escapes].fullmatch(self._held):
            self.written.append(self._held if escapes == "json" else _python_escape(self._held))
            self._held = ""
        elif len(self._held) >= _LONGEST_ESCAPE[escapes] or _WRONG_ESCAPE[escapes].match(self._held):
            self._held = self._held[:-1]
            return self._refuse(at)
        return at + 1

    def _raw_string(self, text: str, at: int, close: str) -> int:
        """Read inside a string without escapes, up to its closing mark."""
        plain, self._held, at, is_closed = until(close, self._held, text, at)
        self.written.append(escaped(plain))
        if is_closed:
            self._end_string()
        return at

    def _end_string(self) -> None:
        self._quotes = None
        self.written.append('"')
        if self._expect == self._key:
            self._expect = self._colon
        else:
            self._end_value()

    def _skip(self, text: str, at: int) -> int:
        space = _SPACE.match(text, at)
        assert space is not None
        if self._stack:
            self.written.append(space[0])
        return space.end()

    def _refuse(self, at: int) -> int:
        self.status = Status.BAD
        return at


_WRONG_ESCAPE = {
    "json": re.compile(r'\\(?:[^"\\/bfnrtu]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F])', re.DOTALL),
    "python": re.compile(
        r"\\(?:x[0-9a-fA-F]?[^0-9a-fA-F]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F]|U[0-9a-fA-F]{0,7}[^0-9a-fA-F])"
    ),
}


def escaped(text: str) -> str:
    """Return the text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _python_escape(escape: str) -> str:
    kind = escape[1]
    if kind in "xuU":
        code = int(escape[2:], 16)
        is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
        return escape if kind == "u" else escaped(chr(code) if is_character else "\ufffd")
    if kind in "'\"\\":
        return escaped(kind)
    return escaped(_PYTHON_ESCAPES.get(kind, escape))


def until(mark: str, held: str, text: str, at: int) -> tuple[str, str, int, bool]:
    """Read text up to a mark that may arrive in pieces.

    held: the beginning of a possible mark, from the text before ``at``. Return the text before the mark, the held text
    for the next call, the position after the consumed text, and whether the mark was found. The cost is O(text).
    """
    if held:
        found, behind = held + text[at], at + 1
    else:
        end = text.find(mark, at)
        behind = len(text) if end < 0 else end + len(mark)
        found = text[at:behind]
    if found.endswith(mark):
        return found[: -len(mark)], "", behind, True
    keep = len(found) - overlap(found, mark)
    return found[:keep], found[keep:], behind, False


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of ``marker`` that ``text`` ends with."""
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def decoded(string: str) -> str:
    """Return the text of a JSON string, with U+FFFD for unpaired surrogates."""
    text: str = json.loads(string)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_object(text: str) -> bool:
    """Return whether the text is one JSON object."""
    reader = ValueReader()
    end = reader.read(text, 0)
    return reader.status is Status.DONE and not text[end:].strip() and text.lstrip().startswith("{")
