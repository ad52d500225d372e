"""Tell a model of tools where its chat template does not: tools, calls and results become text of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]
CALL, CALL_END = "<tool_call>", "</tool_call>"
"""The marks around a call: of all marks, the ones that most models have seen."""
_RESULT, _RESULT_END = "<tool_response>", "</tool_response>"


class Told(Protocol):
    """Convert checked messages to messages without tools. takes_system: the chat template shows messages of the
    system.
    """

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
    ) -> list[Message]: ...


_CALLS = f"""{CALL}
{{"name": "the name of the tool", "arguments": {{"the name of a parameter": "its value"}}}}
{CALL_END}
You may write several calls, one after the other. Their results come back between {_RESULT} and {_RESULT_END}."""
_DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the name of the tool<｜tool▁sep｜>"
    '{"the name of a parameter": "its value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n'
    "You may write several calls between the outer marks, one after the other."
)


def instructions(tools: Sequence[Mapping[str, Any]], calls: str = _CALLS) -> str:
    """Return a text for the model that describes the tools and the notation of calls. calls: the notation."""
    described = "\n".join(map(_json, map(_function, tools)))
    return (
        "You can call tools. Each line describes one, with a JSON schema of its parameters:\n"
        f"{described}\n\n"
        "If a tool helps to answer, call it: write the name and the arguments between marks, and nothing else:\n"
        f"{calls} Otherwise answer in words."
    )


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool) -> list[Message]:
    """Convert checked messages to messages without tools. The first message describes the tools, calls are in the
    content of their message, and the results of adjacent calls are one message of the user, followed by the user's own
    text.

    takes_system: the chat template shows messages of the system; otherwise the tools are in the user's first message.
    """
    found: list[Message] = []
    names: dict[object, str] = {}
    is_open = False  # the last message has results, so text of the user is added to it
    for message in messages:
        role, content = message["role"], message["content"] or ""
        if role in ("tool", "function"):
            name = message.get("name") or names.get(message.get("tool_call_id"))
            content = _result(name, content)
            role = "user"
        is_result = role != message["role"]
        if calls := message.get("tool_calls"):
            names |= {call.get("id"): _function(call)["name"] for call in calls}
            content = _joined(content, "\n".join(map(_call, calls)), "\n")
        if is_open and role == "user":
            found[-1]["content"] = _joined(found[-1]["content"], content, "\n")
        else:
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            found.append({**kept, "role": role, "content": content})
        is_open = is_result
    return _described(found, instructions(tools), takes_system) if tools else found


def deepseek31_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool = True
) -> list[Message]:
    """Describe the tools to DeepSeek V3.1 in words. Its chat template shows calls and results."""
    return _described([*messages], instructions(tools, _DEEPSEEK_CALLS), takes_system) if tools else [*messages]


def with_written_calls(
    messages: Sequence[Message], write: Callable[[Sequence[Mapping[str, Any]]], str], between: str = ""
) -> list[Message]:
    """Convert checked messages for a chat template that does not show calls: they are in the content of their message.

    write: returns the text of the functions of calls, which have names and arguments.
    """
    found: list[Message] = []
    for message in messages:
        made = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := message.get("tool_calls"):
            made["content"] = _joined(message["content"] or "", write([*map(_function, calls)]), between)
        found.append(made)
    return found


def phi4_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool = True
) -> list[Message]:
    """Convert checked messages to those of Phi-4-mini's chat template: the tools are in the field ``tools`` of the
    system's message, calls are in the content of their message, and results have the role that the vocabulary has a
    token for.
    """
    found = with_written_calls(
        messages, lambda calls: f"<|tool_call|>[{', '.join(map(json_call, calls))}]<|/tool_call|>"
    )
    for made in found:
        if made["role"] in ("tool", "function"):
            made["role"] = "tool_response"
    if tools:
        if found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": "You are a helpful assistant with some tools."})
        found[0] = {**found[0], "tools": _json([*map(_function, tools)])}
    return found


def _described(messages: list[Message], text: str, takes_system: bool) -> list[Message]:
    """Return the messages with the description of the tools at the beginning."""
    role = "system" if takes_system else "user"
    at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if at is None or (takes_system and at > 0):
        return [{"role": role, "content": text}, *messages]
    first = messages[at]
    # The text comes after the system's, which says what the model is, and before the user's, which asks.
    content = _joined(first["content"], text, "\n\n") if takes_system else _joined(text, first["content"], "\n\n")
    return [*messages[:at], {**first, "content": content}, *messages[at + 1 :]]


def _call(call: Mapping[str, Any]) -> str:
    return f"{CALL}\n{json_call(_function(call))}\n{CALL_END}"


def json_call(function: Mapping[str, Any]) -> str:
    """Return the function of a call as JSON."""
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'{{"name": {_json(function["name"])}, "arguments": {written}}}'


def python_call(function: Mapping[str, Any]) -> str:
    """Return the function of a call in Python's notation."""
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{function['name']}({arguments})"


def _function(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool or of a call."""
    function: Mapping[str, Any] = described.get("function", described)
    return function


def _result(name: str | None, content: str | list[Any]) -> str | list[Any]:
    """Return a result as content. name: the name of the tool, if known. Parts that are not text come after the text."""
    if isinstance(content, list):
        text = "\n".join(part["text"] for part in content if part["type"] == "text")
        return [{"type": "text", "text": _result(name, text)}, *(part for part in content if part["type"] != "text")]
    named = {} if name is None else {"name": name}
    return f"{_RESULT}\n{_json({**named, 'content': content})}\n{_RESULT_END}"


def _joined(first: str | list[Any], second: str | list[Any], between: str) -> str | list[Any]:
    """Join two contents."""
    if isinstance(first, str) and isinstance(second, str):
        return between.join(text for text in (first, second) if text)
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
