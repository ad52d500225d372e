"""Readers of tool calls: they convert the text of a call region, piece by piece, to events."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from foreword.messages.message import ArgumentsDelta, CallEnd, CallError, CallStart, Event, MessageBuilder, ToolCall
from foreword.messages.notation import JSON, MAX_WORD, Notation, Status, ValueReader, decoded, is_object

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys that models write for the arguments of a call, whatever their chat template has."""
_LABELS = ("id", "call_id", "tool_call_id", "type", "index")
"""Keys of a call that say nothing of its arguments."""
_NAME = re.compile(r"[\w.\-]+")
_TICKS = "```"
_FENCE = re.compile(r"`{1,2}|```\w{0,20}[ \t\r\n]{0,20}")
"""The text that opens a block of code, or its beginning."""


class CallSink:
    """Collect the events of calls, which are numbered within a message, and the text that is not part of an event.

    unread: text since the beginning of the region, or since the last event, that is not part of an event. schemas: the
    JSON schemas of the tools' parameters, by the names of the tools, as far as they are known.
    """

    __slots__ = ("_error", "_make_id", "_open", "allowed", "events", "num_calls", "schemas", "unread")

    def __init__(
        self,
        make_id: Callable[[int], str],
        allowed: frozenset[str] | None,
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self._make_id, self.allowed, self.schemas = make_id, allowed, schemas
        self.events: list[Event] = []
        self.unread: list[str] = []
        self.num_calls = 0
        self._open = False
        self._error: CallError | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a call has started and not ended."""
        return self._open

    def start(self, name: str) -> None:
        self.events.append(CallStart(self.num_calls, self._make_id(self.num_calls), name))
        self.unread.clear()
        self._open, self._error = True, None
        self.num_calls += 1

    def arguments(self, text: str, error: CallError | None = None) -> None:
        if text:
            self.events.append(ArgumentsDelta(self.num_calls - 1, text))
            self.unread.clear()
        self._error = self._error or error

    def end(self, error: CallError | None = None) -> None:
        self.events.append(CallEnd(self.num_calls - 1, error or self._error))
        self.unread.clear()
        self._open = False


def arguments_of(function: Mapping[str, Any]) -> object:
    """Return the arguments of a call that was read as a whole, as `JsonCallsReader` takes them. Raise LookupError if no
    known key has them, but another key may.
    """
    others = {key: value for key, value in function.items() if key not in ("name", *_LABELS)}
    key = next((key for key in ARGUMENTS if key in others), None)
    if key is None and others:
        raise LookupError("no arguments")
    found = None if key is None else others[key]
    if isinstance(found, str) and found.strip():
        found = json.loads(found)
    return {} if found is None or found == "" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls as JSON objects, alone or in lists: ``{"name": "f", "arguments": {…}}``.

    name, arguments: the keys; another key of `ARGUMENTS` is read as arguments, too. If name is "", the only key is the
    name of the tool: ``{"f": {…}}``. listed: a grammar writes a list.
    separators: characters between two calls outside a list. unmarked: no mark distinguishes a call from other JSON, so
    a call must have arguments and the name of a known tool. closed: a call has only these two keys and labels. number:
    the key of the number of a call, which comes first, if a grammar writes one; its lists then may have line breaks.
    """

    name: str = "name"
    arguments: str = "arguments"
    number: str = ""
    listed: bool = False
    separators: str = ""
    unmarked: bool = False
    closed: bool = False
    notation: Notation = JSON

    def reader(self, sink: CallSink, captures: Mapping[str, str]) -> JsonCallsReader:
        return JsonCallsReader(self, sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Calls as a name followed by its arguments: ``name{…}``, or ``[name(key=value), …]`` if listed.

    capture: the group of the opening mark's pattern that contains the name, if any. begin: the mark before a name.
    prefix: text before a name that an output may leave out. number: the text between the name and the number of the
    call, if a grammar writes one. header: the text that a grammar writes before the arguments; an output may have other
    text before its last mark, "<|message|>" or "[ARGS]". end: the marks behind the arguments; an output may leave out
    each of them. For the other fields see `JsonCalls`.
    """

    notation: Notation = JSON
    opening: Literal["{", "("] = "{"
    listed: bool = False
    capture: str = ""
    begin: str = ""
    prefix: str = ""
    number: str = ""
    header: str = ""
    end: tuple[str, ...] = ()
    separators: str = ""
    unmarked: bool = False

    @property
    def header_end(self) -> str:
        """Return the last mark of the header."""
        return self.header[max(map(self.header.rfind, ("<", "[", "```"))) :].strip() if self.header else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks between two calls, as a reader looks for them."""
        return tuple(mark.strip() for mark in (self.begin, *self.end) if mark)

    def reader(self, sink: CallSink, captures: Mapping[str, str]) -> NamedCallsReader:
        return NamedCallsReader(self, sink, captures.get(self.capture, ""))


class CallsReader:
    """Read the calls of a region. is_bad: the text is damaged at the end of the last `read`.

    separators: characters between two calls. marks: marks between two calls.
    """

    __slots__ = ("_expect", "_in_list", "_marks", "_separators", "_sink", "_value", "is_bad")

    def __init__(self, sink: CallSink, separators: str = "", marks: tuple[str, ...] = ()) -> None:
        self._sink, self._separators, self._marks = sink, separators, marks
        self._value: ValueReader | None = None
        self._in_list = False
        self._expect: Callable[[str, int], int] = self._item
        self.is_bad = False

    @property
    def is_resting(self) -> bool:
        """Return whether the reader is outside every call and list, so that the region may end."""
        return not self.is_bad and not self._in_list and self._expect == self._item

    @property
    def is_unmarked(self) -> bool:
        """Return whether the mark before the region may be part of other text."""
        return False

    def read(self, text: str, at: int) -> int:
        """Consume text until the reader rests or needs more text. Return the position after the consumed text."""
        while at < len(text) and not self.is_bad:
            num_events, expect = len(self._sink.events), self._expect
            behind = expect(text, at)
            if len(self._sink.events) == num_events and not self._streams:
                self._sink.unread.append(text[at:behind])
            needs_more = behind == at and self._expect == expect
            at = behind
            if self.is_resting or needs_more:
                break
        return at

    def collect(self) -> None:
        """End the region: send the calls that are read as a whole."""

    def take_held(self) -> str:
        """Take the text inside arguments that was consumed and is not part of an event."""
        return self._value.take_held() if self._value is not None and self._streams else ""

    def is_between(self, text: str) -> bool:
        """Return whether the text can be between two calls: separators, marks, and the beginning of a mark."""
        for mark in self._marks:
            text = text.replace(mark, "")
        text = text.strip(", \t\r\n[]")
        return not text or any(mark.startswith(text) for mark in self._marks)

    @property
    def _streams(self) -> bool:
        raise NotImplementedError

    def _item(self, text: str, at: int) -> int:
        raise NotImplementedError

    def _between_items(self, char: str, at: int, *, may_list: bool = True) -> int:
        """Read a character between calls that does not begin a call."""
        if char == "[" and may_list and not self._in_list:
            self._in_list = True
        elif char == "]" and self._in_list:
            self._in_list = False
        elif char not in SPACE and (self._in_list or char not in self._separators):
            return self._refuse(at)
        return at + 1

    def _after_item(self, text: str, at: int) -> int:
        """Read a character after an item of a list."""
        char = text[at]
        if char in SPACE:
            return at + 1
        if char == ",":
            self._expect = self._item
        elif char == "]":
            self._in_list = False
            self._expect = self._item
        else:
            return self._refuse(at)
        return at + 1

    def _end_call(self, error: CallError | None = None) -> None:
        self._sink.end(error)
        self._expect = self._after_item if self._in_list else self._item

    def _refuse(self, at: int) -> int:
        self.is_bad = True
        return at


class JsonCallsReader(CallsReader):
    """Read `JsonCalls`."""

    __slots__ = ("_arguments", "_calls", "_has_arguments", "_has_others", "_is_streaming", "_key", "_keys", "_name")

    def __init__(self, calls: JsonCalls, sink: CallSink) -> None:
        super().__init__(sink, calls.separators)
        self._calls = calls
        self._keys = frozenset((calls.arguments, *ARGUMENTS)) - {calls.name}
        self._key = ""
        self._begin()

    def _begin(self) -> None:
        self._name: str | None = None
        self._arguments: list[str] = []  # arguments that were read before the name
        self._has_arguments = self._is_streaming = False
        self._has_others = False  # there are keys whose values are not part of the call

    @property
    def _streams(self) -> bool:
        return self._is_streaming

    def _item(self, text: str, at: int) -> int:
        char = text[at]
        if char != "{":
            return self._between_items(char, at)
        self._begin()
        self._expect = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._refuse(at)  # the call has no name
        return self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] != '"':
            return self._refuse(at)
        self._value, self._expect = ValueReader(), self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        assert self._value is not None
        at = self._value.read(text, at)
        if self._value.status is Status.DONE:
            self._key = decoded("".join(self._value.written))
            if not self._calls.name:
                self._name, self._key = self._key, self._calls.arguments
                if not self._name or not self._may_start():
                    return self._refuse(at)
            if self._key not in (self._calls.name, *self._keys, *_LABELS):
                self._has_others = True
                if self._calls.closed:
                    return self._refuse(at)
            self._expect = self._colon
        elif self._value.status is Status.BAD:
            return self._refuse(at)
        return at

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._expect = self._before_value
            return at + 1
        return at + 1 if text[at] in SPACE else self._refuse(at)

    def _before_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if self._key in self._keys:
            if self._has_arguments or char not in '{"n' or not self._may_start():
                return self._refuse(at)
            self._has_arguments = True
            self._start_if_known()
            self._is_streaming = char == "{" and self._sink.is_open
        elif self._key == self._calls.name and (self._name is not None or char != '"'):
            return self._refuse(at)
        self._value, self._expect = ValueReader(self._calls.notation), self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        value = self._value
        assert value is not None
        at = value.read(text, at)
        if self._is_streaming:
            self._sink.arguments("".join(value.written))
            value.written.clear()
        if value.status is Status.BAD:
            return self._refuse(at)
        if value.status is Status.DONE:
            self._expect = self._after_value
            if self._is_streaming:
                self._is_streaming = False
            elif self._key in self._keys:
                self._take_arguments("".join(value.written))
            elif self._key == self._calls.name:
                self._name = decoded("".join(value.written))
                if not self._name or not self._may_start():
                    return self._refuse(at)
                self._start_if_known()
        return at

    def _take_arguments(self, written: str) -> None:
        """Take arguments that are null, in a string, or before the name. Missing arguments, "" and "null" become {}."""
        if written.startswith('"'):
            written = decoded(written)
        self._arguments = ["{}" if written.strip() in ("", "null") else written]
        if self._sink.is_open:
            self._send_arguments()

    def _send_arguments(self) -> None:
        for text in self._arguments:
            self._sink.arguments(text, None if is_object(text) else "malformed")
        self._arguments = []

    def _may_start(self) -> bool:
        """Return whether the name, as far as it is known, may be that of a call."""
        allowed = self._sink.allowed
        return not self._calls.unmarked or allowed is None or self._name is None or self._name in allowed

    def _start_if_known(self) -> None:
        # After other keys, whose values may be the arguments, a call begins only with its arguments, so that no text is
        # lost.
        if self._name is not None and (self._has_arguments or not (self._calls.unmarked or self._has_others)):
            if not self._sink.is_open:
                self._sink.start(self._name)
            self._send_arguments()

    def _after_value(self, text: str, at: int) -> int:
        char = text[at]
        if char == ",":
            self._expect = self._next_key
        elif char == "}":
            if not self._sink.is_open:
                return self._refuse(at)
            if not self._has_arguments:
                if self._has_others:  # their values may be the arguments
                    return self._refuse(at)
                self._sink.arguments("{}")
            self._end_call()
        elif char not in SPACE:
            return self._refuse(at)
        return at + 1


class BareCalls:
    """Recognise an answer that consists only of a call without marks, or of a list of calls, possibly in a code fence.

    is_open: the text so far may be such an answer, or the beginning of one.
    """

    __slots__ = ("_fence", "_is_behind", "_num_ticks", "_pieces", "_reader", "_sink", "is_open")

    def __init__(self, calls: JsonCalls, allowed: frozenset[str]) -> None:
        self._sink = CallSink(str, allowed)
        self._reader = calls.reader(self._sink, {})
        self._pieces: list[str] = []
        self._fence: str | None = ""  # the part of "```json\n" that was read; None after it
        self._is_behind = False  # the position is after the calls
        self._num_ticks = 0  # characters of the closing fence
        self.is_open = True

    @property
    def text(self) -> str:
        """Return the whole text that was read."""
        return "".join(self._pieces)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls, or none if the text is not complete or a call has an error."""
        builder = MessageBuilder()
        builder.add(self._sink.events)
        calls = builder.message.tool_calls
        return calls if self.is_open and self._is_behind and all(call.error is None for call in calls) else ()

    def read(self, text: str) -> None:
        """Continue with more text. The cost is O(text)."""
        self._pieces.append(text)
        at = 0
        while at < len(text) and self.is_open:
            char = text[at]
            if self._is_behind:
                self._num_ticks += char == "`"
                self.is_open = char in SPACE or (char == "`" and self._num_ticks <= len(_TICKS))
                at += 1
            elif self._fence is not None and char not in "{[":
                self._fence += char
                self.is_open = _FENCE.fullmatch(self._fence) is not None
                at += 1
            else:
                self._fence = None
                at = self._reader.read(text, at)
                self.is_open, self._is_behind = not self._reader.is_bad, self._reader.is_resting


class NamedCallsReader(CallsReader):
    """Read `NamedCalls`."""

    __slots__ = ("_calls", "_header", "_is_streaming", "_name")

    def __init__(self, calls: NamedCalls, sink: CallSink, captured: str) -> None:
        super().__init__(sink, calls.separators, calls.marks)
        self._calls, self._name, self._header = calls, captured, ""
        self._is_streaming = False
        if captured:
            self._expect = self._in_name

    @property
    def _streams(self) -> bool:
        return self._is_streaming

    def _item(self, text: str, at: int) -> int:
        char, begin = text[at], self._calls.begin
        for mark in self._marks:
            if text.startswith(mark, at):
                if mark == begin:
                    self._name, self._expect = "", self._in_name
                return at + len(mark)
        if any(mark.startswith(text[at:]) for mark in self._marks):
            return at
        if not begin and _NAME.match(char) and self._in_list == self._calls.listed:
            self._name, self._expect = "", self._in_name
            return at
        return self._between_items(char, at, may_list=self._calls.listed)

    def _in_name(self, text: str, at: int) -> int:
        if name := _NAME.match(text, at):
            self._name += name[0]
            return name.end() if len(self._name) <= MAX_WORD else self._refuse(name.end())
        if not self._name and text[at] in SPACE:
            return at + 1
        if self._calls.header:
            self._header, self._expect = "", self._in_header
            return at
        return self._begin_arguments(text, at)

    def _in_header(self, text: str, at: int) -> int:
        """Read one character between name and arguments."""
        if self._header.endswith(self._calls.header_end):
            return at + 1 if text[at].isspace() else self._begin_arguments(text, at)
        self._header += text[at]
        return at + 1 if len(self._header) <= MAX_WORD else self._refuse(at)

    def _begin_arguments(self, text: str, at: int) -> int:
        allowed = self._sink.allowed if self._calls.unmarked else None
        name = self._name.removeprefix(self._calls.prefix)
        if not name or text[at] != self._calls.opening or (allowed is not None and name not in allowed):
            return self._refuse(at)
        self._sink.start(name)
        self._value, self._expect, self._is_streaming = ValueReader(self._calls.notation), self._in_arguments, True
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        value = self._value
        assert value is not None
        at = value.read(text, at)
        self._sink.arguments("".join(value.written))
        value.written.clear()
        if value.status is Status.BAD:
            return self._refuse(at)
        if value.status is Status.DONE:
            self._is_streaming = False
            self._end_call()
        return at
