"""Convert the outputs of the engine to Anthropic's message bodies, stream events and errors."""

from __future__ import annotations

import json
from typing import Unpack

from foreword.engine import CompletionOutput, RequestOutput
from foreword.messages import ArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, Message, ReasoningDelta, ToolCall
from foreword.openai.frames import AnswerStream, json_string, named_frame
from foreword.openai.request import ChatRequest
from foreword.openai.response import Body, Named
from foreword.schemas import INVALID_JSON

KIND_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""HTTP status → type of the error; any other below 500 is an invalid request, from 500 on an error of the server."""


def message_body(request: ChatRequest, output: RequestOutput, **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /v1/messages, which has no creation time.

    A request that failed (``output.error``) has no such body.
    """
    (completion,) = output.outputs
    message = completion.message or Message(completion.text)
    content: list[Body] = []
    if message.reasoning is not None:
        content.append(_thinking(message.reasoning))
    if message.content:
        content.append(_text(message.content))
    content += [_tool_use(call.id, call.name, _input(call)) for call in message.tool_calls]
    has_calls = bool(message.tool_calls)
    return {**_message(named, content), **_stop(request, completion, has_calls=has_calls), "usage": usage(output)}


def usage(output: RequestOutput) -> Body:
    """Return the token counts of a request; ``input_tokens`` does not include cached tokens."""
    counted = output.usage
    found = {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }
    if counted.reasoning_tokens is None:
        return found
    return {**found, "output_tokens_details": {"thinking_tokens": counted.reasoning_tokens}}


def error_body(status: int, message: str) -> Body:
    """Return the body of an error in Anthropic's form."""
    kind = KIND_OF_STATUS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageStream(AnswerStream[RequestOutput]):
    """The events of one answer, as frames of bytes: message_start, content blocks, message_delta, message_stop.

    A block ends where the next one begins. The cost of an output is O(new text).
    """

    __slots__ = ("_at", "_block", "_has_calls", "_index", "_is_started", "_named", "_request")
    keep_alive = named_frame("ping", {"type": "ping"})

    def __init__(self, request: ChatRequest, **named: Unpack[Named]) -> None:
        self._request, self._named = request, named
        self._index = -1  # index of the last block
        self._block: str | None = None  # type of the open block
        self._at = ""  # first bytes of its deltas
        self._has_calls = self._is_started = False

    def frames(self, output: RequestOutput) -> bytes:
        (completion,) = output.outputs
        frames = [] if self._is_started else [self._start(output)]
        for event in completion.events:
            frames += self._of(event)
        if output.finished:
            frames += [*self._close(), *self._end(output, completion)]
        return b"".join(frames)

    def _start(self, output: RequestOutput) -> bytes:
        self._is_started = True
        message = {**_message(self._named, []), "stop_reason": None, "stop_sequence": None, "usage": usage(output)}
        return named_frame("message_start", {"type": "message_start", "message": message})

    def _of(self, event: Event) -> list[bytes]:
        match event:
            case ContentDelta(text):
                return [*self._open(_text("")), self._delta("text_delta", "text", text)]
            case ReasoningDelta(text):
                return [*self._open(_thinking("")), self._delta("thinking_delta", "thinking", text)]
            case CallStart(_, call_id, name):
                self._has_calls = True
                return [*self._close(), *self._open(_tool_use(call_id, name, {}))]
            case ArgumentsDelta(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]
            case CallEnd():
                return self._close()

    def _open(self, block: Body) -> list[bytes]:
        """Open a block, unless a block of this type is open."""
        if self._block == block["type"]:
            return []
        closing = self._close()
        self._index, self._block = self._index + 1, block["type"]
        self._at = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},"delta":{{"type":'
        )
        body = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closing, named_frame("content_block_start", body)]

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return f'{self._at}"{kind}","{name}":{json_string(text)}}}}}\n\n'.encode("ascii")

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [named_frame("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    def _end(self, output: RequestOutput, completion: CompletionOutput) -> list[bytes]:
        delta = _stop(self._request, completion, has_calls=self._has_calls)
        body = {"type": "message_delta", "delta": delta, "usage": usage(output)}
        return [named_frame("message_delta", body), named_frame("message_stop", {"type": "message_stop"})]


def _message(named: Named, content: list[Body]) -> Body:
    of_all = {"id": f"msg_{named['response_id']}", "type": "message", "role": "assistant", "model": named["model"]}
    return {**of_all, "content": content}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _thinking(text: str) -> Body:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call_id: str, name: str, arguments: Body) -> Body:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _input(call: ToolCall) -> Body:
    """Return the arguments as an object. Damaged text is wrapped as Anthropic's documentation proposes."""
    if call.error is None:
        found: Body = json.loads(call.arguments)
        return found
    return {INVALID_JSON: call.arguments}


def _stop(request: ChatRequest, completion: CompletionOutput, *, has_calls: bool) -> Body:
    """Return why the answer ended; null for an aborted answer."""
    reason: str | None = None
    sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
    if completion.finish_reason == "length":
        limit = request.params.max_tokens
        is_context = limit is not None and completion.num_tokens < limit
        reason = "model_context_window_exceeded" if is_context else "max_tokens"
    elif completion.finish_reason == "stop":
        reason = "stop_sequence" if sequence is not None else "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}
