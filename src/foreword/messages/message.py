"""A model's answer as a message: content, reasoning and tool calls; and the events in which it arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

CallError = Literal["incomplete", "malformed"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: JSON text, an object unless error says otherwise.

    error: "incomplete" if the output ended inside the call, "malformed" if its text is damaged; arguments is then the
    text so far. A complete call has None.
    """

    id: str
    name: str
    arguments: str
    error: CallError | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """An assistant's message. reasoning: None if the output has none."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    role: str = "assistant"

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the form of chat templates and OpenAI's clients, to be appended to a conversation."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return found


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: its number in the message from 0, its id, and the name of the tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. error: see `ToolCall`."""

    index: int
    error: CallError | None = None


Event = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


class MessageBuilder:
    """Build a message from events. Adding an event costs O(1)."""

    __slots__ = ("_arguments", "_content", "_errors", "_reasoning", "_starts")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._starts: list[CallStart] = []
        self._arguments: list[list[str]] = []
        self._errors: list[CallError | None] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ArgumentsDelta(index, text):
                    self._arguments[index].append(text)
                case CallStart():
                    self._starts.append(event)
                    self._arguments.append([])
                    self._errors.append("incomplete")
                case CallEnd(index, error):
                    self._errors[index] = error

    @property
    def message(self) -> Message:
        """Return the message so far; a call that has not ended is incomplete."""
        calls = zip(self._starts, self._arguments, self._errors, strict=True)
        return Message(
            content="".join(self._content),
            reasoning="".join(self._reasoning) if self._reasoning else None,
            tool_calls=tuple(ToolCall(start.id, start.name, "".join(texts), error) for start, texts, error in calls),
        )
