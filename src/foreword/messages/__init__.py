"""Parse messages from text: tool calls and reasoning, incrementally, by a declaration of the model's format."""

from foreword.messages.formats import FORMATS, Region, ResponseFormat, format_named, format_of_template
from foreword.messages.message import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
)
from foreword.messages.parser import MessageParser, parse_message

__all__ = [
    "FORMATS",
    "ArgumentsDelta",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "Event",
    "Message",
    "MessageParser",
    "ReasoningDelta",
    "Region",
    "ResponseFormat",
    "ToolCall",
    "format_named",
    "format_of_template",
    "parse_message",
]
