"""The messages and tools of a conversation, checked and in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from foreword.errors import RequestError
from foreword.fields import check_json
from foreword.names import advice, nearest
from foreword.schemas import INVALID_JSON, schema_of

ROLES = ("system", "user", "assistant", "tool", "developer", "function")
"""Roles that every interface has. Others are those that a template names."""
LABELS = frozenset(("annotations", "cache_control", "citations", "id", "index", "logprobs"))
"""Fields of a part of a message that other systems read, and that change no prompt."""
MAX_VALUES = 1 << 18
"""The most signs in arguments given as JSON text: no other thread runs while they are read. Signs inside of texts count
as well.
"""

WRITTEN_CALL = ("call00000", {"a": 1})
"""The call that shows how a chat template writes calls: its name and arguments. The name is also its id, because some
templates write the id in place of the name, and some refuse ids of other lengths. The value is a number, because some
templates of Python's notation write texts without quotation marks.
"""


def check_messages(
    messages: object, *, media: Collection[str] = (), roles: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the messages in the form that templates expect: content as one string, arguments of calls as objects, or
    as their text where it is not an object. A field that is null counts as absent, at any depth.

    media: content with a part {"type": "image"} is allowed for "image", and stays a list. roles: that are known beside
    `ROLES`. The input is not modified.
    RequestError names the first wrong field, such as ``messages[2].role``.
    """
    listed = _items("messages", messages, "a list of messages", '[{"role": "user", "content": "…"}]')
    if not listed:
        _fail("messages", messages, "is empty", "Give at least one message")
    return [_check_message(f"messages[{i}]", message, media, roles) for i, message in enumerate(listed)]


def with_ids(messages: Sequence[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Return checked messages whose calls have ids of this form, such as ``functions.{name}:{number}``, and their
    results the same ones. The number counts the calls of all messages.
    """
    found, ids, number = [], {}, 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            calls.append({**call, "id": form.format(name=call.get("function", call)["name"], number=number)})
            ids[str(call.get("id"))] = calls[-1]["id"]
            number += 1
        answered = str(message.get("tool_call_id"))
        changed = {"tool_calls": calls} if calls else {"tool_call_id": ids[answered]} if answered in ids else {}
        found.append({**message, **changed})
    return found


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the descriptions of tools: None or a list of objects, with types such as Pydantic's models as the schemas
    of parameters. The other fields are not checked; those that are null count as absent.
    """
    if tools is None:
        return None
    found = []
    for i, tool in enumerate(_items("tools", tools, "a list of tools", '[{"type": "function", "function": {…}}]')):
        if not isinstance(tool, Mapping):
            _fail(f"tools[{i}]", tool, "is not an object", 'Give {"type": "function", "function": {…}}')
        made = _with_schema(f"tools[{i}]", tool)
        if isinstance(function := made.get("function"), Mapping):
            made["function"] = _with_schema(f"tools[{i}].function", function)
        check_json(f"tools[{i}]", made)
        found.append(made)
    return found or None


def _with_schema(field: str, function: Mapping[str, Any]) -> dict[str, Any]:
    made = _without_nulls(function)
    if "parameters" in made:
        try:
            made["parameters"] = schema_of(made["parameters"])
        except TypeError as error:
            _fail(f"{field}.parameters", made["parameters"], str(error), "Give a JSON schema")
    return made


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: item for name, item in value.items() if item is not None}


def _items(field: str, value: object, kind: str, example: str) -> Sequence[Any]:
    """Return a value that must be a list. Raise RequestError if it is not."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        _fail(field, value, f"is not {kind}", f"Give {example}")
    return value


def _check_message(field: str, message: object, media: Collection[str], roles: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _fail(field, message, "is not an object", 'Give {"role": "user", "content": "…"}')
    role = message.get("role")
    if not isinstance(role, str) or (role not in ROLES and role not in roles):
        found = "is missing" if "role" not in message else "is not a role that the chat template knows"
        similar = nearest(role, ROLES) if isinstance(role, str) else None
        _fail(f"{field}.role", role, found, f"Did you mean {similar!r}?" if similar else f"Give {' or '.join(ROLES)}")
    for name, fix in _NOT_SUPPORTED.items():
        value = message.get(name)
        if value is not None and not (isinstance(value, list) and not value):
            _fail(f"{field}.{name}", value, "is not supported", fix)
    checked = _without_nulls(message)
    check_json(field, {name: value for name, value in checked.items() if name != "content"})
    calls = _check_calls(f"{field}.tool_calls", checked.pop("tool_calls", None))
    content = _check_content(f"{field}.content", message.get("content"), media)
    if content is None and not calls:
        if role not in _MAY_BE_SILENT:
            found = "is missing" if "content" not in message else "is null"
            _fail(f"{field}.content", content, found, "Give a string, which may be empty")
        content = ""
    return {**checked, "content": content, **({"tool_calls": calls} if calls else {})}


_NOT_SUPPORTED = {
    "function_call": "Give tool_calls",
    "audio": "Give its transcript as the content",
    "images": "Give parts of the content, such as image_url",
}
"""Fields of messages with contents that no chat template shows → what to give in their place."""

_MAY_BE_SILENT = ("assistant", "tool")
"""Roles of what models and tools made, which may be nothing."""


def _check_content(field: str, content: object, media: Collection[str]) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    example = '"…" or [{"type": "text", "text": "…"}]'
    for i, part in enumerate(_items(field, content, "a string or a list of parts", example)):
        part = _without_nulls(part) if isinstance(part, Mapping) else part
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in media:
            parts.append({"type": kind})
            continue
        if not isinstance(kind, str) or kind != "text":
            fix = f'Give {{"type": "text", "text": "…"}}: only {" and ".join(("text", *media))} is supported'
            _fail(f"{field}[{i}]", part, "is not a text part", fix)
        if not isinstance(text := part.get("text"), str):
            _fail(f"{field}[{i}].text", text, "is not a string", "Give a str")
        for name in part.keys() - LABELS - {"type", "text"}:
            _fail(f"{field}[{i}].{name}", part[name], "unknown field", advice(name, ("type", "text"), "Leave it out"))
        parts.append({"type": "text", "text": text})
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _check_calls(field: str, calls: object) -> list[dict[str, Any]]:
    listed = () if calls is None else _items(field, calls, "a list of calls", '[{"type": "function", "function": {…}}]')
    return [_check_call(f"{field}[{i}]", call) for i, call in enumerate(listed)]


def _check_call(field: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function", call), Mapping):
        _fail(field, call, "is not a call", 'Give {"type": "function", "function": {"name": "…", "arguments": {…}}}')
    at = f"{field}.function" if "function" in call else field
    function = _without_nulls(function)
    if not isinstance(name := function.get("name"), str):
        _fail(f"{at}.name", name, "is not a string", "Give the name of the called tool")
    for name in ("parameters", "args", "input"):
        if name in function and "arguments" not in function:
            _fail(f"{at}.{name}", function[name], "unknown field", "Did you mean 'arguments'?")
    function["arguments"] = _check_arguments(f"{at}.arguments", function.get("arguments"))
    return {**_without_nulls(call), "function": function} if "function" in call else function


def _check_arguments(field: str, arguments: object) -> Mapping[str, Any] | str:
    """Return the arguments as an object, because templates serialise them themselves. None, "" and "null" become {}.
    Text that is not an object, such as that of a call that was cut off, stays text.
    """
    if isinstance(arguments, Mapping) and arguments.keys() == {INVALID_JSON}:
        arguments = arguments[INVALID_JSON]
    if arguments is None or isinstance(arguments, Mapping):
        return arguments or {}
    if not isinstance(arguments, str):
        _fail(field, arguments, "is neither an object nor text", 'Give an object such as {"city": "Paris"}')
    if (count := sum(map(arguments.count, "{[,"))) > MAX_VALUES:
        _fail(field, arguments, f"has {count} values, more than {MAX_VALUES}", "Give fewer")
    try:
        found = json.loads(arguments.strip() or "null")
    except (ValueError, RecursionError):
        return arguments
    return {} if found is None else found if isinstance(found, dict) else arguments


def _fail(field: str, value: object, reason: str, fix: str) -> NoReturn:
    raise RequestError(None, field, value, reason, fix)
