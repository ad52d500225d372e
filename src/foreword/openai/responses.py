"""OpenAI's Responses API: parse bodies into requests, and convert outputs to response bodies and stream events.

The caller stores responses: it gives a request the items of earlier responses, and a function that stores the new one.
A field that is unknown or not supported, and a value of another type, raise a RequestError with the path of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack
from uuid import uuid4

from foreword.engine import CompletionOutput, RequestOutput
from foreword.engine.chat import ChatOptions
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, OBJECT, OBJECTS, STRING, Fields, either, one_of
from foreword.media.parts import DETAILS
from foreword.messages import ArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, Message, ReasoningDelta
from foreword.openai import neutral
from foreword.openai.conversation import Conversation
from foreword.openai.frames import AnswerStream, json_string, named_frame
from foreword.openai.request import (
    CHOICES,
    EFFORT,
    LABELS,
    NOTHING,
    OF_TEMPLATE,
    ChatRequest,
    Suggested,
    image_processing,
    limit_of,
    named_choice,
    object_asked,
    params_of,
    request_options,
    sampling_fields,
    schema_asked,
    template_variables,
)
from foreword.openai.response import Body, Named

OWN_NAMES = frozenset({"n", "best_of"})
"""Fields of `SamplingParams` that would need more than one answer."""

_ITEMS = either(STRING, OBJECTS)
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""The beginnings of the ids of items."""


def _keep_nothing(response: Body, items: list[Body]) -> None:
    """Store nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """The body of /v1/responses. chat: the conversation. echo: the fields of the body that its response repeats. items:
    its own input, as items. keep: stores a response with its items.
    """

    chat: ChatRequest
    echo: Mapping[str, Any]
    items: list[Body]
    keep: Callable[[Body, list[Body]], None] = field(default=_keep_nothing, compare=False)

    def stored(self, response: Body) -> None:
        """Store the final response, if the request asks for it. This may wait for a disk."""
        if response["store"]:
            self.keep(
                response,
                [{"id": f"{_PREFIXES.get(item['type'], 'item')}_{uuid4().hex}", **item} for item in self.items],
            )

    @property
    def model(self) -> str | None:
        return self.chat.model


def parse_responses(
    body: object,
    suggested: Suggested = NOTHING,
    *,
    earlier: Sequence[Body] = (),
    stores: bool = False,
    keep: Callable[[Body, list[Body]], None] = _keep_nothing,
) -> ResponsesRequest:
    """Parse a body of /v1/responses. Raise RequestError if it cannot be served as given.

    earlier: returns the items of the previous response and of all responses before it. stores: the default of
    ``store``. keep: stores a response.
    """
    fields = Fields(body)
    sampling = sampling_fields(fields, suggested, without=OWN_NAMES)
    labels = {name: fields.take(name, kind) for name, kind in LABELS.items()}
    instructions = fields.take("instructions", STRING)
    conversation = Conversation()
    if instructions is not None:
        conversation.text("system", instructions, "instructions")
    for i, item in enumerate(earlier):
        _add_item(conversation, Fields(item, f"previous_response_id.{i}"))
    items = _add_input(conversation, fields)
    store = fields.take("store", BOOLEAN)
    previous = fields.take("previous_response_id", STRING)
    effort = None
    if reasoning := fields.nested("reasoning"):
        effort = reasoning.take("effort", EFFORT)
        reasoning.end(neutral.REASONING)
    format = _format(fields)
    structured = _structured_outputs(fields, format)
    if structured is not None:
        sampling["structured_outputs"] = structured
    tools = fields.take("tools", OBJECTS, [])
    choice = fields.take("tool_choice", either(CHOICES, OBJECT), "auto")
    chat = ChatOptions(
        tools=[_tool(Fields(tool, f"tools[{i}]")) for i, tool in enumerate(tools)] or None,
        tool_choice=choice if isinstance(choice, str) else named_choice(Fields(choice, "tool_choice"), _name),
        parallel_tool_calls=fields.take("parallel_tool_calls", BOOLEAN, True),
        template=template_variables(fields),
        reasoning_effort=effort,
        mm_processor_kwargs=image_processing(fields),
    )
    names = {"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", **OF_TEMPLATE}
    params = params_of(names, **sampling, max_tokens=limit_of(fields, "max_output_tokens", suggested.get("max_tokens")))
    stream = fields.take("stream", BOOLEAN, False)
    if (in_stream := fields.nested("stream_options")) is not None:
        in_stream.end(neutral.STREAM_OPTIONS)
    request = ChatRequest(
        model=fields.take("model", STRING),
        messages=conversation.messages,
        params=params,
        chat=chat,
        options=request_options(fields),
        stream=stream,
        origins={
            **names,
            **{f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))},
            **dict.fromkeys(("messages", "prompt", "prompt_token_ids"), "input"),
            **conversation.origins,
        },
    )
    fields.end(neutral.RESPONSES)
    echo = {
        "instructions": instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": labels["metadata"] or {},
        "parallel_tool_calls": chat["parallel_tool_calls"],
        "previous_response_id": previous,
        "prompt_cache_key": labels["prompt_cache_key"],
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": labels["safety_identifier"],
        "store": stores if store is None else store,
        "temperature": params.temperature,
        "text": {"format": format},
        "tool_choice": choice,
        "tools": tools,
        "top_p": params.top_p,
        "user": labels["user"],
    }
    return ResponsesRequest(chat=request, echo=echo, items=items, keep=keep)


def response_body(request: ResponsesRequest, output: RequestOutput, **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /v1/responses. A request that failed (``output.error``) has no such body."""
    (completion,) = output.outputs
    message = completion.message or Message(completion.text)
    items = _Items(named["response_id"])
    whole: list[Event] = []
    if message.reasoning is not None:
        whole.append(ReasoningDelta(message.reasoning))
    if message.content or not message.tool_calls:
        whole.append(ContentDelta(message.content))
    for i, call in enumerate(message.tool_calls):
        whole += [CallStart(i, call.id, call.name), ArgumentsDelta(i, call.arguments), CallEnd(i, call.error)]
    for event in whole:
        items.frames(event)
    items.close(is_cut=completion.finish_reason != "stop")
    return _response(request, named, items.output, output, completion)


class ResponseStream(AnswerStream[RequestOutput]):
    """The events of one response as frames of bytes, from response.created to the last event.

    The cost of an output is O(new text).
    """

    __slots__ = ("_is_started", "_items", "_named", "_request")

    def __init__(self, request: ResponsesRequest, **named: Unpack[Named]) -> None:
        self._request, self._named = request, named
        self._items = _Items(named["response_id"])
        self._is_started = False

    def frames(self, output: RequestOutput) -> bytes:
        (completion,) = output.outputs
        frames = self._begin()
        for event in completion.events:
            frames += self._items.frames(event)
        if output.finished:
            frames += self._items.close(is_cut=completion.finish_reason != "stop")
            body = self._body(output, completion)
            self._request.stored(body)
            kind = "completed" if body["status"] == "completed" else "incomplete"
            frames.append(self._items.frame(f"response.{kind}", {"response": body}))
        return b"".join(frames)

    def waits(self, output: RequestOutput) -> bool:
        return output.finished and bool(self._request.echo["store"])

    def failed(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        body = {**self._body(None, None), "status": "failed", "error": error}
        return b"".join([*self._begin(), self._items.frame("response.failed", {"response": body})])

    def _begin(self) -> list[bytes]:
        if self._is_started:
            return []
        self._is_started = True
        body = {"response": self._body(None, None)}
        return [self._items.frame(f"response.{name}", body) for name in ("created", "in_progress")]

    def _body(self, output: RequestOutput | None, completion: CompletionOutput | None) -> Body:
        return _response(self._request, self._named, self._items.output, output, completion)


class _Items:
    """The output items of a response, and the frames of their events.

    output: the complete items. An item ends where the next one begins.
    """

    def __init__(self, response_id: str) -> None:
        self.output: list[Body] = []
        self._response_id = response_id
        self._sequence = 0
        self._item: Body = {}  # the open item; empty: none
        self._texts: list[str] = []  # texts of the open item

    def frame(self, kind: str, body: Body) -> bytes:
        self._sequence += 1
        return named_frame(kind, {"type": kind, "sequence_number": self._sequence - 1, **body})

    def frames(self, event: Event) -> list[bytes]:
        match event:
            case ContentDelta(text):
                return [*self._open("message"), self._delta("output_text", text)]
            case ReasoningDelta(text):
                return [*self._open("reasoning"), self._delta("reasoning_text", text)]
            case CallStart(_, call_id, name):
                return [*self.close(), *self._open("function_call", call_id=call_id, name=name, arguments="")]
            case ArgumentsDelta(_, text):
                return [self._delta("function_call_arguments", text)]
            case CallEnd(_, error):
                return self.close(is_cut=error is not None)

    def close(self, *, is_cut: bool = False) -> list[bytes]:
        """Close the open item, if there is one. is_cut: its text is not complete."""
        if not self._item:
            return []
        item, at, text = self._item, self._at, "".join(self._texts)
        self._item, self._texts = {}, []
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            frames = [
                self.frame("response.function_call_arguments.done", {**at, "name": item["name"], "arguments": text})
            ]
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            at["content_index"] = 0
            more: Body = {"logprobs": []} if item["type"] == "message" else {}
            frames = [
                self.frame(f"response.{part['type']}.done", {**at, "text": text, **more}),
                self.frame("response.content_part.done", {**at, "part": part}),
            ]
        self.output.append(item)
        done = {"output_index": len(self.output) - 1, "item": item}
        return [*frames, self.frame("response.output_item.done", done)]

    @property
    def _at(self) -> Body:
        return {"item_id": self._item["id"], "output_index": len(self.output)}

    def _open(self, kind: str, **more: str) -> list[bytes]:
        """Open an item, unless an item of this kind is open."""
        if self._item.get("type") == kind:
            return []
        closing = self.close()
        self._item = {
            "id": f"{_PREFIXES[kind]}_{self._response_id}_{len(self.output)}",
            "type": kind,
            "status": "in_progress",
        }
        self._item |= more
        if kind != "function_call":
            self._item["content"] = []
        if kind == "message":
            self._item["role"] = "assistant"
        if kind == "reasoning":
            self._item["summary"] = []
        body = {"output_index": len(self.output), "item": self._item}
        frames = [*closing, self.frame("response.output_item.added", body)]
        if kind != "function_call":
            part = {**self._at, "content_index": 0, "part": _part(kind, "")}
            frames.append(self.frame("response.content_part.added", part))
        return frames

    def _delta(self, name: str, text: str) -> bytes:
        self._texts.append(text)
        kind, content = f"response.{name}.delta", "" if name == "function_call_arguments" else '"content_index":0,'
        logprobs = ',"logprobs":[]' if name == "output_text" else ""
        self._sequence += 1
        return (
            f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._sequence - 1},'
            f'"item_id":"{self._item["id"]}","output_index":{len(self.output)},{content}'
            f'"delta":{json_string(text)}{logprobs}}}\n\n'
        ).encode("ascii")


def _part(kind: str, text: str) -> Body:
    """Return the only part of the content of a message or of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    request: ResponsesRequest,
    named: Named,
    items: list[Body],
    output: RequestOutput | None,
    completion: CompletionOutput | None,
) -> Body:
    """Return the body of a response. output, completion: the final ones, or None before the end."""
    reason = completion.finish_reason if completion is not None else None
    status = {None: "in_progress", "stop": "completed", "length": "incomplete"}.get(reason, "cancelled")
    return {
        "id": f"resp_{named['response_id']}",
        "object": "response",
        "created_at": named["created"],
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        "model": named["model"],
        "output": list(items),
        "service_tier": "default",
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None if output is None else usage(output),
        **request.echo,
    }


def usage(output: RequestOutput) -> Body:
    """Return the token counts of a request, in the form of the Responses API."""
    counted = output.usage
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens or 0},
        "total_tokens": counted.total_tokens,
    }


def _add_input(conversation: Conversation, fields: Fields) -> list[Body]:
    """Add the input, and return it as items."""
    items = fields.require("input", _ITEMS)
    if isinstance(items, str):
        conversation.text("user", items, "input")
        items = [{"role": "user", "content": items}]
    else:
        if not items:
            raise RequestError(None, "input", items, "is empty", "Give at least one item.")
        for i, item in enumerate(items):
            _add_item(conversation, Fields(item, f"input[{i}]"))
    return [_listed(item) for item in items]


def _listed(item: Mapping[str, Any]) -> Body:
    """Return an item of the input in the form of item lists: with a type, and its content as parts."""
    kind, content = item.get("type") or "message", item.get("content")
    found = {name: value for name, value in item.items() if value is not None} | {"type": kind}
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": content}]
    return found


def _add_item(conversation: Conversation, item: Fields) -> None:
    kind = item.take("type", STRING, "message")
    item.take("id", STRING)
    item.take("status", STRING)
    if kind == "message":
        role = item.require("role", one_of("user", "assistant", "system", "developer"))
        _add_content(conversation, "system" if role == "developer" else role, item)
        item.end({"phase": ("commentary", "final_answer")})
    elif kind == "function_call":
        name, arguments = item.require("name", STRING), item.take("arguments", either(STRING, OBJECT))
        conversation.call(item.require("call_id", STRING), name, arguments, item.path("arguments"))
        item.end({"namespace": (), "caller": ({"type": "direct"},), "async": (False,)})
    elif kind == "function_call_output":
        call_id = item.require("call_id", STRING)
        conversation.result(call_id, "\n".join(_texts(item, "output", "input_text")), item.path("output"))
        item.take("name", STRING)
        item.end({"namespace": (), "caller": ({"type": "direct"},)})
    elif kind == "reasoning":
        content = item.take("content", OBJECTS, [])
        item.take("summary", OBJECTS)
        for i, part in enumerate(content):
            at = item.path(f"content[{i}]")
            conversation.reasoning(_text_of(Fields(part, at), ("reasoning_text",)), at)
        item.end({"encrypted_content": ("",)})
    else:
        known = "message, function_call, function_call_output, reasoning"
        raise item.refuse("type", kind, f"Give one of {known}.")


def _add_content(conversation: Conversation, role: str, item: Fields) -> None:
    content = item.take("content", _ITEMS, "") if role == "assistant" else item.require("content", _ITEMS)
    if isinstance(content, str):
        conversation.text(role, content, item.path("content"))
        return
    for i, piece in enumerate(content):
        part = Fields(piece, at := item.path(f"content[{i}]"))
        if role == "user" and piece.get("type") == "input_image":
            part.take("type", STRING)
            conversation.image(role, part.require("image_url", STRING), at)
            part.end({"detail": DETAILS, "file_id": (), "prompt_cache_breakpoint": ()})
        else:
            conversation.text(role, _text_of(part, ("input_text", "output_text")), at)


def _texts(fields: Fields, name: str, *kinds: str) -> list[str]:
    """Return the texts of a field that is a text or a list of text parts."""
    value = fields.take(name, _ITEMS, "")
    if isinstance(value, str):
        return [value]
    return [_text_of(Fields(part, f"{fields.path(name)}[{i}]"), kinds) for i, part in enumerate(value)]


def _text_of(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.require("type", STRING)
    if kind not in kinds:
        raise part.refuse("type", kind, f"Give {' or '.join(kinds)}: only text is supported.")
    text: str = part.require("text", STRING)
    part.take("annotations", OBJECTS)
    part.take("logprobs", OBJECTS)
    part.end({"prompt_cache_breakpoint": ()})
    return text


def _format(fields: Fields) -> Body:
    """Return ``text.format`` as given, {"type": "text"} by default."""
    text = fields.nested("text")
    if text is None:
        return {"type": "text"}
    format: Body = text.take("format", OBJECT, {"type": "text"})
    text.end(neutral.TEXT_OF_RESPONSES)
    return format


def _structured_outputs(fields: Fields, format: Body) -> object:
    """Return the structured outputs for ``text.format``, or ``structured_outputs`` itself."""
    direct: Body | None = fields.take("structured_outputs", OBJECT)
    asked = Fields(format, "text.format")
    kind, found = asked.require("type", one_of("text", "json_object", "json_schema")), None
    if kind == "json_object":
        found = object_asked(asked)
    elif kind == "json_schema":
        asked.require("name", STRING)
        found = schema_asked(asked)
    asked.end()
    if found is not None and direct is not None:
        raise RequestError(None, "text.format", format, "structured_outputs is given too", "Give only one of them.")
    return direct if found is None else found


def _tool(tool: Fields) -> Body:
    """Return a description of a tool in the form of chats."""
    kind = tool.require("type", STRING)
    if kind != "function":
        raise tool.refuse("type", kind, "Describe a function of your own.")
    function = {"name": tool.require("name", STRING), "description": tool.take("description", STRING)}
    function["parameters"] = tool.take("parameters", OBJECT)
    function["strict"] = tool.take("strict", BOOLEAN)
    tool.end({"allowed_callers": (["direct"],), "defer_loading": (False,), "output_schema": ()})
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _name(chosen: Fields) -> str:
    """Return the name in a choice of a tool."""
    name: str = chosen.require("name", STRING)
    return name
