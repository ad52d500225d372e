"""The incremental parser: it reads text in pieces of any size, and gives events and the message that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from foreword.messages.calls import BareCalls, CallSink, CallsReader
from foreword.messages.formats import Region, ResponseFormat
from foreword.messages.markers import Match
from foreword.messages.message import ContentDelta, Event, Message, MessageBuilder, ReasoningDelta


class MessageParser:
    """Parse the output of a model in pieces. The message does not depend on how the text is cut.

    format: the format of the output. prompt: the text before the output; a chat template may have opened the reasoning.
    tool_names: the tools, or None if they are not known; calls without a mark are recognised only if they are known. An
    answer that may consist only of such calls is held back until this is certain. tool_schemas: the JSON schemas of
    their parameters, by name; in notations of calls without types, they say which values are strings. call_id: the
    prefix of the ids of calls, which are numbered; None: a random one.

    A call begins when its name is known. Damaged text is content before that, and part of the call's arguments
    afterwards. The cost is O(text) in total.

    reasoning_end: number of characters of the output up to the first end of reasoning, its mark included; None before.
    """

    def __init__(
        self,
        format: ResponseFormat,
        *,
        prompt: str = "",
        tool_names: Iterable[str] | None = None,
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        call_id: str | None = None,
    ) -> None:
        prefix = f"call-{uuid4().hex[:12]}-" if call_id is None else call_id
        self._format = format
        names = None if tool_names is None else frozenset(tool_names)
        self._sink = CallSink(lambda index: f"{prefix}{index}", names, tool_schemas or {})
        self._builder = MessageBuilder()
        self._buffer = ""  # text from _at on may be the beginning of a mark
        self._at = 0
        self._dropped = 0  # number of characters of the output before the buffer
        self.reasoning_end: int | None = None
        self._content = _Text(ContentDelta, strip_start=format.strip_ends)
        self._reasoning = _Text(ReasoningDelta, strip_start=format.strip_ends)
        self._region = format.outside
        self._reader: CallsReader | None = None
        self._opening, self._calls_before = "", 0
        self._at_start = True  # only whitespace so far
        self._bare: BareCalls | None = None
        self._may_be_bare = False  # no content and no call so far
        is_begun = False  # the prompt contains the beginning of the answer
        start = format.anchor.last_end(prompt) if format.anchor is not None else None
        if start is None and format.reasoning_marks is not None:  # another vendor's template has this format
            mark, whole = format.reasoning_marks[0], prompt.rstrip()
            start = len(whole) - len(mark) if whole.endswith(mark) else None
        if start is not None:
            self._advance(prompt[start:])
            is_begun = self._content.has_text or self._sink.num_calls > 0 or bool(self._buffer.strip())
            self._sink.events[:] = [event for event in self._sink.events if not isinstance(event, _TEXT_EVENTS)]
            self._content.forget()
            self._reasoning.forget()
            self._dropped, self.reasoning_end = -len(self._buffer), None
        self._may_be_bare = format.bare is not None and bool(self._sink.allowed) and not is_begun

    @property
    def in_reasoning(self) -> bool:
        """Return whether the text ends inside the reasoning."""
        return self._region.kind == "reasoning"

    @property
    def message(self) -> Message:
        """Return the message so far."""
        return self._builder.message

    def push(self, text: str) -> list[Event]:
        """Add text. Return the events that it completes."""
        self._advance(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the output. A call that has not ended is incomplete."""
        if self._bare is not None:
            self._end_bare(self._bare)
        self._process(at_end=True)
        if self._reader is not None:
            self._sink.unread.append(self._buffer[self._at :])
            self._end_calls(None)
        self._region = self._format.outside
        if not self._format.strip_ends:
            self._sink.events += [*self._content.rest(), *self._reasoning.rest()]
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events = self._sink.events
        self._sink.events = []
        self._builder.add(events)
        return events

    def _advance(self, text: str) -> None:
        # The match of a pattern may depend on where the text ends. Reading one character at a time avoids this.
        for piece in text if self._format.has_patterns else (text,):
            self._buffer += piece
            self._process(at_end=False)

    def _process(self, *, at_end: bool) -> None:
        at, before = self._at, None
        while before != (state := (at, self._region, self._reader, self._bare)):  # until nothing changes
            before = state
            if self._bare is not None:
                at = self._in_bare(self._bare, at)
            elif self._reader is not None:
                at = self._in_calls(at, at_end)
            elif self._region is self._format.outside:
                at = self._outside(at, at_end)
            else:
                at = self._in_text(at, at_end)
        self._at = min(at, _CONTEXT) if self._format.has_patterns else 0
        self._dropped += at - self._at
        self._buffer = self._buffer[at - self._at :]

    def _outside(self, at: int, at_end: bool) -> int:
        text = self._buffer
        found: Match | None = None
        region: Region | None = None
        first = _skip_space(text, at) if self._at_start or self._may_be_bare else len(text)
        if self._at_start:
            unmarked = [r for r in self._format.regions if first < len(text) and text[first] in r.unmarked]
            if unmarked:
                self._write(self._region, text[at:first])
                return self._open(unmarked[0], Match(first, first, {}))
            self._at_start = first == len(text)
        if self._may_be_bare and self._format.bare is not None and first < len(text) and text[first] in "{[`":
            self._write(self._region, text[at:first])
            self._may_be_bare = False
            self._bare = BareCalls(self._format.bare, self._sink.allowed or frozenset())
            return first
        stop = len(text)
        if at_end and self._content.is_behind_mark:  # so the text may be the beginning of a mark
            stop = min((marker.cut(text, at) for marker, _ in self._format.openings), default=stop)
        for marker, owner in self._format.openings:
            match, pending = marker.find(text, at, at_end=at_end)
            stop = min(stop, pending)
            if match is not None and (found is None or (match.start, -match.end) < (found.start, -found.end)):
                found, region = match, owner or self._format.owners[text[match.start : match.end]]
        if found is None or found.start >= stop:
            self._write(self._region, text[at:stop])
            return stop
        self._write(self._region, text[at : found.start])
        assert region is not None
        return self._open(region, found)

    def _in_bare(self, bare: BareCalls, at: int) -> int:
        """Read calls that may be the whole answer. If they are not, their text is read as usual."""
        bare.read(self._buffer[at:])
        if bare.is_open:
            return len(self._buffer)
        self._bare, text = None, bare.text
        self._dropped -= len(text) - (len(self._buffer) - at)
        self._buffer = self._buffer[:at] + text
        return at

    def _end_bare(self, bare: BareCalls) -> None:
        """End the output: it is either calls or text."""
        self._bare, calls = None, bare.calls
        for call in calls:
            self._sink.start(call.name)
            self._sink.arguments(call.arguments)
            self._sink.end()
        if calls:
            self._mark()
        else:
            self._dropped -= len(bare.text)
            self._buffer += bare.text
            self._process(at_end=False)

    def _in_text(self, at: int, at_end: bool) -> int:
        text, region = self._buffer, self._region
        found: Match | None = None
        stop, is_close = len(text), True
        for marker in (region.close, region.until):
            if marker is None:
                continue
            match, pending = marker.find(text, at, at_end=at_end)
            stop = min(stop, marker.cut(text, at) if at_end and match is None else pending)
            if match is not None and (found is None or match.start < found.start):
                found, is_close = match, marker is region.close
        if found is None or found.start >= stop:
            self._write(region, text[at:stop])
            return stop
        self._write(region, text[at : found.start])
        self._mark()
        behind = found.end if is_close else found.start
        if region.kind == "reasoning" and self.reasoning_end is None:
            self.reasoning_end = self._dropped + behind
        self._region = self._format.outside
        return behind

    def _open(self, region: Region, match: Match) -> int:
        self._at_start = False
        if region is self._format.outside:  # its closing mark
            self._mark()
        elif region.calls is None:
            self._mark()
            self._region = region
        else:
            self._region, self._may_be_bare = region, False
            self._opening, self._calls_before = self._buffer[match.start : match.end], self._sink.num_calls
            self._sink.unread = []
            self._reader = region.calls.reader(self._sink, match.captures)
        return match.end

    def _in_calls(self, at: int, at_end: bool) -> int:
        text, region, reader = self._buffer, self._region, self._reader
        assert reader is not None
        if at == len(text):
            return at
        if reader.is_resting:
            if (behind := _skip_space(text, at)) > at:
                self._sink.unread.append(text[at:behind])
                return behind
            for marker in (region.close, region.open):
                match, may_come = marker.match(text, at) if marker is not None else (None, False)
                if match is not None:
                    is_close = marker is region.close
                    self._end_calls(text[at : match.end] if is_close else "")
                    return match.end if is_close else at
                if may_come and not at_end:
                    return at
                if at_end and marker is not None and marker.cut(text, at) == at:
                    self._end_calls("")
                    return len(text)
        at = reader.read(text, at)
        if not reader.is_bad:
            return at
        if not self._sink.is_open and (region.close is None or reader.is_unmarked):
            self._end_calls("")
            return at
        return self._damaged(at, at_end)

    def _damaged(self, at: int, at_end: bool) -> int:
        """Read text up to the closing mark that is not a call."""
        text, close = self._buffer, self._region.close
        found, stop = close.find(text, at, at_end=at_end) if close is not None else (None, len(text))
        if found is not None and found.start < stop:
            self._sink.unread.append(text[at : found.start])
            self._end_calls(text[found.start : found.end])
            return found.end
        if at_end and close is not None:
            stop = close.cut(text, at)
        self._sink.unread.append(text[at:stop])
        if at_end:
            self._end_calls(text[stop:])
        return len(text) if at_end else stop

    def _end_calls(self, closing: str | None) -> None:
        """End the region: mark is its closing mark or "", or None at the end of the output. Text outside of calls is
        content.
        """
        sink, reader = self._sink, self._reader
        assert reader is not None
        reader.collect()
        has_calls = sink.num_calls > self._calls_before
        if has_calls:
            self._mark()
        if sink.is_open:
            unread = "".join(sink.unread) if reader.is_bad else ""
            sink.arguments(reader.take_held() + unread)
            sink.end("malformed" if reader.is_bad else "incomplete")
        elif not has_calls:
            self._write(self._format.content, "".join([self._opening, *sink.unread, closing or ""]))
        elif (reader.is_bad or closing is None) and not reader.is_between(rest := "".join(sink.unread)):
            self._write(self._format.content, rest)
        sink.unread = []
        self._reader, self._region = None, self._format.outside

    def _write(self, region: Region, text: str) -> None:
        self._may_be_bare = self._may_be_bare and (region.kind == "reasoning" or not text.strip())
        if text and region.kind != "discard":
            writer = self._reasoning if region.kind == "reasoning" else self._content
            self._sink.events += writer.write(text, region)

    def _mark(self) -> None:
        """Drop whitespace next to a mark."""
        self._content.mark()
        self._reasoning.mark()


_CONTEXT = 100  # number of characters before the position that a pattern can read
_TEXT_EVENTS = (ContentDelta, ReasoningDelta)


class _Text:
    """The content or the reasoning of a message, without whitespace next to marks.

    Whitespace at the end is held back until more text follows. Parts with a mark between them are joined.
    """

    __slots__ = ("_event", "_is_fresh", "_space", "has_text", "is_behind_mark")

    def __init__(self, event: Callable[[str], Event], *, strip_start: bool) -> None:
        self._event = event
        self._space: list[str] = []
        self._is_fresh = strip_start  # whitespace at the beginning is dropped, as after a mark
        self.has_text = False
        self.is_behind_mark = False  # and no text has followed

    def write(self, text: str, region: Region) -> list[Event]:
        kept = text.rstrip() if region.strip else text
        space = text[len(kept) :]
        if self._is_fresh and region.strip:
            kept = kept.lstrip()
        if not kept:
            if not self._is_fresh:
                self._space.append(space)
            return []
        join = region.join if self._is_fresh and self.has_text else ""
        new = "".join([join, *self._space, kept])
        self._space = [space]
        self._is_fresh, self.is_behind_mark, self.has_text = False, False, True
        return [self._event(new)]

    def mark(self) -> None:
        """Record that a mark follows."""
        self._space = []
        self._is_fresh = self.is_behind_mark = True

    def forget(self) -> None:
        """Drop the text so far, which belongs to the prompt."""
        self._space = []
        self.has_text = self.is_behind_mark = False

    def rest(self) -> list[Event]:
        """Return the whitespace at the end of the output."""
        space, self._space = "".join(self._space), []
        return [self._event(space)] if space else []


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def parse_message(
    text: str,
    format: ResponseFormat,
    *,
    prompt: str = "",
    tool_names: Iterable[str] | None = None,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    call_id: str | None = None,
) -> Message:
    """Return the message of a whole output. See `MessageParser`."""
    parser = MessageParser(format, prompt=prompt, tool_names=tool_names, tool_schemas=tool_schemas, call_id=call_id)
    parser.push(text)
    parser.finish()
    return parser.message
