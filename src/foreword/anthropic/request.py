"""Parse the body of an Anthropic Messages request into a `ChatRequest`.

A body may have Anthropic's fields and, under their own names, the fields of `SamplingParams`. A field that is null
counts as absent. An unknown or unsupported field, and a value of a wrong type, raise a RequestError with the path of
the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreword.batch import Origin, StructuredOutputs
from foreword.engine.chat import ChatOptions
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, INTEGER, OBJECT, STRING, Fields, either, list_of, one_of
from foreword.openai import neutral
from foreword.openai.conversation import Conversation
from foreword.openai.request import (
    NOTHING,
    OF_TEMPLATE,
    TEXTS,
    ChatRequest,
    Suggested,
    params_of,
    request_options,
    sampling_fields,
    template_variables,
)

OWN_NAMES = frozenset({"stop", "n", "best_of"})
"""Fields of `SamplingParams` that Anthropic names otherwise, or that would need more than one answer."""

_EFFORT = one_of("low", "medium", "high", "xhigh", "max")
_BLOCKS = either(STRING, list_of(OBJECT, "a list of content blocks"))


def parse_messages(body: object, suggested: Suggested = NOTHING) -> ChatRequest:
    """Parse a body of /v1/messages. Raise RequestError if it cannot be served as given.

    ``cache_control`` is accepted everywhere, since every prefix is cached. The budget of thinking is a target, as
    Anthropic documents it, and does not end the thinking.
    """
    return _parse(Fields(body), suggested, is_count=False)


def parse_count(body: object) -> ChatRequest:
    """Parse a body of /v1/messages/count_tokens: the same conversation, without sampling parameters."""
    return _parse(Fields(body), NOTHING, is_count=True)


def _parse(fields: Fields, suggested: Suggested, *, is_count: bool) -> ChatRequest:
    sampling = {} if is_count else sampling_fields(fields, suggested, without=OWN_NAMES)
    max_tokens = None if is_count else fields.require("max_tokens", INTEGER)
    if (stop := None if is_count else fields.take("stop_sequences", TEXTS)) is not None:
        sampling["stop"] = stop
    structured, effort = _output_config(fields)
    if structured is not None:
        sampling["structured_outputs"] = structured
    _take_cache_control(fields)
    if (metadata := fields.nested("metadata")) is not None:
        metadata.take("user_id", STRING)
        metadata.end()
    conversation = Conversation()
    for text, at in _texts(fields, "system"):
        conversation.text("system", text, at)
    for message in _messages(fields):
        _add_message(conversation, message)
    if conversation.last_role == "assistant":
        fix = "End with a message of the user: an answer cannot be continued."
        raise fields.refuse("messages", conversation.messages[-1]["role"], fix)
    names = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort", **OF_TEMPLATE}
    tools = _tools(fields)
    asked = {
        "reasoning_effort": effort,
        "thinking": _thinking(fields, max_tokens),
        "template": template_variables(fields),
        **_tool_choice(fields),
    }
    request = ChatRequest(
        model=fields.require("model", STRING),
        messages=conversation.messages,
        params=params_of(names, **sampling, max_tokens=max_tokens),
        chat=ChatOptions(tools=tools, **asked),  # type: ignore[typeddict-item]
        options=request_options(fields),
        stream=fields.take("stream", BOOLEAN, False),
        origins={**names, **_origins_of_tools(len(tools or ())), **conversation.origins},
    )
    fields.end(neutral.MESSAGES)
    return request


def _messages(fields: Fields) -> Iterator[Fields]:
    """Yield the fields of each message. Raise RequestError at the end if there are no messages."""
    is_empty = True
    for message in fields.nested_list("messages") or ():
        is_empty = False
        yield message
    if is_empty:
        raise RequestError(None, "messages", None, "is missing or empty", "Give at least one.")


def _output_config(fields: Fields) -> tuple[object, str | None]:
    """Return ``output_config.format`` or ``structured_outputs``, and the effort. The effort is None for "high", which
    is Anthropic's default and leaves the model unchanged.
    """
    direct = fields.take("structured_outputs", OBJECT)
    config = fields.nested("output_config")
    format = effort = None
    if config is not None:
        format, effort = config.nested("format"), config.take("effort", _EFFORT)
        config.end()
    effort = None if effort == "high" else effort
    if format is None:
        return direct, effort
    format.require("type", one_of("json_schema"))
    schema, at = format.require("schema", OBJECT), format.path("schema")
    format.end()
    if direct is not None:
        fix = "Give only one of them."
        raise RequestError(None, "output_config.format", schema, "structured_outputs is given too", fix)
    return StructuredOutputs.of_schema(schema, Origin(at, schema)), effort


def _thinking(fields: Fields, max_tokens: int | None) -> bool | None:
    """Return whether ``thinking`` asks for thinking, or None for adaptive thinking, which changes nothing."""
    thinking = fields.nested("thinking")
    if thinking is None:
        return None
    kind = thinking.require("type", one_of("enabled", "disabled", "adaptive"))
    if kind == "enabled":
        budget = thinking.require("budget_tokens", INTEGER)
        if budget < 1024 or (max_tokens is not None and budget >= max_tokens):
            reason = "must be at least 1024 and less than max_tokens"
            raise RequestError(None, thinking.path("budget_tokens"), budget, reason, "Change one of them.")
    thinking.end({"display": ()})
    return None if kind == "adaptive" else kind == "enabled"


def _take_cache_control(fields: Fields) -> None:
    """Take ``cache_control`` and ignore it: every prefix is cached as long as there is room."""
    if (control := fields.nested("cache_control")) is not None:
        for name in ("type", "ttl", "scope"):
            control.take(name, STRING)
        control.end()


def _origins_of_tools(count: int) -> dict[str, str]:
    """Return the names of the fields of tools and of their choice in the body."""
    found = {"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
    for i in range(count):
        found |= {f"tools[{i}].function": f"tools[{i}]", f"tools[{i}].function.parameters": f"tools[{i}].input_schema"}
    return found


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = fields.nested_list("tools")
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.take("type", STRING, "custom")
    if kind != "custom":
        raise tool.refuse("type", kind, "Describe a tool of your own, with name and input_schema.")
    function = {"name": tool.require("name", STRING), "description": tool.take("description", STRING)}
    function["parameters"] = tool.require("input_schema", OBJECT)
    function["strict"] = tool.take("strict", BOOLEAN)
    _take_cache_control(tool)
    tool.end(neutral.TOOL_OF_MESSAGES)
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(fields: Fields) -> dict[str, Any]:
    choice = fields.nested("tool_choice")
    if choice is None:
        return {}
    kind = choice.require("type", one_of("auto", "any", "tool", "none"))
    found: object = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        found = {"type": "function", "function": {"name": choice.require("name", STRING)}}
    parallel = True if kind == "none" else not choice.take("disable_parallel_tool_use", BOOLEAN, False)
    choice.end()
    return {"tool_choice": found, "parallel_tool_calls": parallel}


def _add_message(conversation: Conversation, message: Fields) -> None:
    role = message.require("role", one_of("user", "assistant", "system"))
    content = message.take("content", _BLOCKS, "") if role == "assistant" else message.require("content", _BLOCKS)
    message.end()
    if isinstance(content, str):
        conversation.text(role, content, message.path("content"))
        return
    for i, block in enumerate(content):
        at = message.path(f"content[{i}]")
        _add_block(conversation, role, Fields(block, at), at)


def _add_block(conversation: Conversation, role: str, block: Fields, at: str) -> None:
    kind = block.require("type", STRING)
    known = {
        "user": ("text", "image", "tool_result"),
        "assistant": ("text", "thinking", "tool_use"),
        "system": ("text",),
    }[role]
    if kind not in known:
        fix = f"Content of the role {role} may have blocks of the types {', '.join(known)}."
        raise block.refuse("type", kind, fix)
    _take_cache_control(block)
    if kind == "text":
        conversation.text(role, block.require("text", STRING), at)
        block.end({"citations": ([], {"enabled": False})})
    elif kind == "image":
        source = block.nested("source")
        if source is None:
            raise RequestError(None, block.path("source"), None, "is missing", "Give the image.")
        conversation.image(role, _image_url(source), at)
        block.end()
    elif kind == "thinking":
        conversation.reasoning(block.require("thinking", STRING), at)
        block.take("signature", STRING)
        block.end()
    elif kind == "tool_use":
        name, arguments = block.require("name", STRING), block.take("input", either(OBJECT, STRING))
        conversation.call(block.require("id", STRING), name, arguments, block.path("input"))
        block.end({"caller": ({"type": "direct"},), "toolset_name": ()})
    else:
        failed = block.take("is_error", BOOLEAN, False)
        text = "\n".join(text for text, _ in _texts(block, "content"))
        # Chat templates do not show the flag, so the text contains it.
        conversation.result(block.require("tool_use_id", STRING), f"Error: {text}" if failed else text, at)
        block.end({"toolset_name": ()})


def _image_url(source: Fields) -> str:
    kind = source.require("type", one_of("base64", "url"))
    if kind == "url":
        url: str = source.require("url", STRING)
    else:
        url = f"data:{source.require('media_type', STRING)};base64,{source.require('data', STRING)}"
    source.end()
    return url


def _texts(fields: Fields, name: str) -> list[tuple[str, str]]:
    """Yield text and path of a field that is a text, or of each text block of a list."""
    value, at = fields.take(name, _BLOCKS, ""), fields.path(name)
    if isinstance(value, str):
        return [(value, at)] if value else []
    return [(_text_of(Fields(block, f"{at}[{i}]")), f"{at}[{i}]") for i, block in enumerate(value)]


def _text_of(block: Fields) -> str:
    kind = block.require("type", STRING)
    if kind != "text":
        raise block.refuse("type", kind, "Only text is supported.")
    text: str = block.require("text", STRING)
    _take_cache_control(block)
    block.end({"citations": ([], {"enabled": False})})
    return text
