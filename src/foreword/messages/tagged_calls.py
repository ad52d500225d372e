"""Tool calls whose name and arguments are between tags: ``<function=f><parameter=a>1</parameter></function>``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from foreword.messages.calls import SPACE, CallSink, CallsReader
from foreword.messages.notation import MAX_WORD, PYTHON, Notation, Status, ValueReader, escaped, until
from foreword.schemas import resolved, types_of

_VALUES = Notation(quotes=PYTHON.quotes, constants=PYTHON.constants)
"""The notation of values that are not strings: models write lists and words of JSON or of Python."""
_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""The types of values in JSON by their first character; others are strings and numbers."""
_TEXT = frozenset(["string"])
NAME = re.compile(r"[^\s<>()\[\]{}\"',`]+")
"""The name of a tool."""
KEY = re.compile(r"[^<>\"\r\n]+")
"""A key between tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Calls as a name, followed by a key and a value between tags per argument.

    name, key, value: the texts around the name of the tool, a key and a value. Those around the name, and the one
    before a value, may be empty; without a text before the name, a region has one call. end: the text that ends a call.
    quotes: the texts around a value that contains the beginning of a tag, inside of those of the value; "" if there are
    none. has_lines: a value is on lines of its own, so one newline at each of its ends is not part of it. unmarked: the
    mark before the region may be part of other text, so the name must be that of a known tool, and the region ends
    where no call can follow. listed, separators: as of `JsonCalls`.

    The types of values are those of the tools' schemas: see `value_as_json`.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    quotes: tuple[str, str] = ("", "")
    has_lines: bool = False
    unmarked: bool = False
    listed: ClassVar[bool] = False
    separators: ClassVar[str] = ""

    def reader(self, sink: CallSink, captures: Mapping[str, str]) -> TaggedCallsReader:
        return TaggedCallsReader(self, sink)

    def written(self, text: str) -> str:
        """Return the value of a text between the tags of a value."""
        return text.removeprefix("\n").removesuffix("\n") if self.has_lines else text


def parameter_schema(schema: Mapping[str, Any], key: str) -> object:
    """Return the schema of the value of a key, or None if there is none. schema: that of a tool's parameters."""
    found = resolved(schema, schema)
    schema = found if isinstance(found, Mapping) else {}
    properties = schema.get("properties")
    others = schema.get("additionalProperties")
    return properties.get(key, others) if isinstance(properties, Mapping) else others


def value_as_json(text: str, types: frozenset[str] | None) -> str:
    """Return a value between tags as JSON. types: the types that its schema allows; None: any.

    A text that is a number, a constant, a list or an object of JSON or Python has this value, if its type is allowed;
    any other text is a string.
    """
    reader = ValueReader(_VALUES)
    end = reader.read(text + " ", 0)  # the space ends a number
    value = "".join(reader.written).strip()
    if reader.status is Status.DONE and not text[end:].strip() and not value.startswith('"'):
        is_whole = value.removesuffix(".0").removeprefix("-").isdigit()
        kinds = {_KINDS[value[0]]} if value[0] in _KINDS else {"number", "integer"} if is_whole else {"number"}
        if types is None or types & kinds:
            return value
    return json.dumps(text, ensure_ascii=False)


class TaggedCallsReader(CallsReader):
    """Read `TaggedCalls`. A value that can only be a string is sent piece by piece, any other as a whole."""

    __slots__ = (
        "_calls", "_close", "_held", "_is_ended", "_is_first", "_newline", "_pieces", "_schema", "_tags", "_types",
        "_word",
    )  # fmt: skip

    def __init__(self, calls: TaggedCalls, sink: CallSink) -> None:
        super().__init__(sink, marks=(calls.name[0],) if calls.name[0] else ())
        self._calls = calls
        self._schema: Mapping[str, Any] = {}  # the schema of the tool's parameters
        self._tags: Mapping[str, Callable[[], None]] = {}  # the tags that may come next, and what follows each
        self._word = ""  # the name or a key, as far as it was read
        self._is_ended = False  # a call of the region has ended
        self._is_first = True  # the next argument is the first one
        self._types: frozenset[str] | None = None  # the types of a value
        self._pieces: list[str] = []  # the parts of a value
        self._close = ""  # the text that ends a value
        self._held = ""  # the beginning of this text
        self._newline: str | None = None  # a newline that may be the last of a value; None at its beginning

    @property
    def is_unmarked(self) -> bool:
        return self._calls.unmarked

    @property
    def _streams(self) -> bool:
        return self._expect == self._in_text

    def take_held(self) -> str:
        """Take the text of a value that the output cuts off. A tag that is cut off is dropped."""
        if self._streams:
            return escaped((self._newline or "") + self._held)
        return "".join([*self._pieces, self._held]) if self._expect == self._in_value else ""

    def _after(self, tags: Mapping[str, Callable[[], None]]) -> None:
        """Set the tags that may come next. An empty tag needs no text."""
        if "" in tags:
            tags[""]()
        else:
            self._tags, self._expect = tags, self._tag

    def _tag(self, text: str, at: int) -> int:
        """Read a tag, or whitespace before it. A part of a tag is not consumed."""
        if text[at] in SPACE:
            return at + 1
        for tag, follow in self._tags.items():
            if text.startswith(tag, at):
                follow()
                return at + len(tag)
        is_part = any(tag.startswith(text[at:]) for tag in self._tags)
        return at if is_part else self._refuse(at)

    def _item(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if self._is_ended and not self._calls.name[0]:  # any text would be a name
            return self._refuse(at)
        self._after({self._calls.name[0]: self._begin_name})
        return at

    def _begin_name(self) -> None:
        self._word, self._expect = "", self._in_name

    def _in_name(self, text: str, at: int) -> int:
        return self._in_word(text, at, NAME, {self._calls.name[1]: self._start})

    def _in_word(self, text: str, at: int, pattern: re.Pattern[str], tags: Mapping[str, Callable[[], None]]) -> int:
        """Read more of a word, and expect these tags after it."""
        if found := pattern.match(text, at):
            self._word += found[0]
            return found.end() if len(self._word) <= MAX_WORD else self._refuse(found.end())
        if not self._word:
            return self._refuse(at)
        self._after(tags)
        return at

    def _start(self) -> None:
        if self._calls.unmarked and self._sink.allowed is not None and self._word not in self._sink.allowed:
            self.is_bad = True
            return
        self._sink.start(self._word)
        self._schema = self._sink.schemas.get(self._word, {})
        self._is_first = True
        self._expect_argument()

    def _expect_argument(self) -> None:
        self._after({self._calls.key[0]: self._begin_key, self._calls.end: self._end})

    def _end(self) -> None:
        self._sink.arguments("{}" if self._is_first else "}")
        self._end_call()
        self._is_ended = True

    def _begin_key(self) -> None:
        self._word, self._expect = "", self._in_key

    def _in_key(self, text: str, at: int) -> int:
        return self._in_word(text, at, KEY, {self._calls.key[1]: self._end_key})

    def _end_key(self) -> None:
        self._after({self._calls.value[0]: self._begin_value})

    def _begin_value(self) -> None:
        key = json.dumps(self._word, ensure_ascii=False)
        self._sink.arguments(f"{{{key}: " if self._is_first else f", {key}: ")
        self._is_first, self._pieces, self._held, self._newline = False, [], "", None
        self._types = types_of(parameter_schema(self._schema, self._word), self._schema)
        if self._types == _TEXT:
            self._sink.arguments('"')
        self._close, self._expect = self._calls.value[1], self._in_quotes
        if not self._calls.quotes[0]:
            self._expect_value()

    def _expect_value(self) -> None:
        self._expect = self._in_text if self._types == _TEXT else self._in_value

    def _in_quotes(self, text: str, at: int) -> int:
        """Read the text before a value that contains the beginning of a tag, if it is there."""
        opening, closing = self._calls.quotes
        if text.startswith(opening, at):
            at, self._close = at + len(opening), closing
        elif opening.startswith(text[at:]):
            return at
        self._expect_value()
        return at

    def _end_value(self) -> None:
        if self._close == self._calls.value[1]:
            self._expect_argument()
        else:
            self._after({self._calls.value[1]: self._expect_argument})

    def _in_value(self, text: str, at: int) -> int:
        piece, self._held, at, is_closed = until(self._close, self._held, text, at)
        self._pieces.append(piece)
        if is_closed:
            self._sink.arguments(value_as_json(self._calls.written("".join(self._pieces)), self._types))
            self._end_value()
        return at

    def _in_text(self, text: str, at: int) -> int:
        """Read more of a string. One newline at each end of it may be part of the tags."""
        piece, self._held, at, is_closed = until(self._close, self._held, text, at)
        if self._calls.has_lines and piece:
            piece = piece.removeprefix("\n") if self._newline is None else self._newline + piece
            self._newline = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        self._sink.arguments(escaped(piece))
        if is_closed:
            self._sink.arguments('"')
            self._end_value()
        return at
