"""Convert the outputs of the engine to OpenAI's chunks, as frames of server-sent events.

The constant parts of a response's chunks are encoded once; each output only encodes its new text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any, Unpack

from foreword.engine import CompletionOutput, RequestOutput
from foreword.messages import ArgumentsDelta, CallStart, ContentDelta, Event, ReasoningDelta
from foreword.openai.frames import AnswerStream, encoded
from foreword.openai.request import ChatRequest, CompletionRequest
from foreword.openai.response import (
    Body,
    Named,
    TextChoice,
    Tokens,
    chat_logprobs,
    finish_reason,
    head,
    num_new_values,
    num_values,
    usage,
)

DONE = "data: [DONE]\n\n"


class Chunks:
    """The frames of one response. The chunk of a choice is ``index, what, logprobs, finish_reason``."""

    def __init__(self, kind: str, prefix: str, named: Named, *, include_usage: bool) -> None:
        self._head = f"data: {_json(head(kind, prefix, named))[:-1]}"
        self._prefix = f'{self._head},"choices":[{{"index":'
        self._include_usage = include_usage
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._suffix = f',"logprobs":null,"finish_reason":null}}]{self._end}'

    def chunk(self, index: int, what: str, logprobs: Body | None = None, reason: str | None = None) -> str:
        """Return a chunk. what: the choice's own field, as JSON."""
        if logprobs is None and reason is None:
            return f"{self._prefix}{index},{what}{self._suffix}"
        ending = f'"logprobs":{_of_items(logprobs)},"finish_reason":{_json(reason)}'
        return f"{self._prefix}{index},{what},{ending}}}]{self._end}"

    def end(self, outputs: Iterable[RequestOutput]) -> bytes:
        """Return the last frames. outputs: the final output of each prompt."""
        found = f'{self._head},"choices":[],"usage":{_json(usage(list(outputs)))}}}\n\n' if self._include_usage else ""
        return encoded(found + DONE)


class ChatStream(AnswerStream[RequestOutput]):
    """The frames of an answer to /v1/chat/completions."""

    def __init__(self, request: ChatRequest, tokens: Tokens, **named: Unpack[Named]) -> None:
        self._chunks = Chunks("chat.completion.chunk", "chatcmpl", named, include_usage=request.include_usage)
        self._tokens, self._num_alternatives = tokens, request.params.logprobs or 0
        self._begun: set[int] = set()
        self._outputs: list[RequestOutput] = []

    def frames(self, output: RequestOutput) -> bytes:
        """Return the frames of an output that `foreword.engine.chat.ChatReader` has read: one per choice that has new
        values.
        """
        if output.finished:
            self._outputs.append(output)
        return encoded("".join([self._frames(completion) for completion in output.outputs]))

    def size(self, output: RequestOutput) -> int:
        return num_new_values(output)

    def end(self) -> bytes:
        return self._chunks.end(self._outputs)

    def _frames(self, completion: CompletionOutput) -> str:
        index, events = completion.index, completion.events
        begin = ""
        if index not in self._begun:
            self._begun.add(index)
            begin = self._chunks.chunk(index, '"delta":{"role":"assistant","content":""}')
        found = chat_logprobs(completion.new_token_ids, completion.new_logprobs, self._num_alternatives, self._tokens)
        # The message is parsed as a whole when all choices have ended, so they end together.
        reason = None if completion.message is None else finish_reason(completion)
        if not events and reason is None and (found is None or not found["content"]):
            return begin
        return begin + self._chunks.chunk(index, f'"delta":{_delta(events)}', found, reason)


class CompletionStream(AnswerStream[RequestOutput]):
    """The frames of an answer to /v1/completions."""

    def __init__(self, request: CompletionRequest, tokens: Tokens, **named: Unpack[Named]) -> None:
        self._chunks = Chunks("text_completion", "cmpl", named, include_usage=request.include_usage)
        self._request, self._tokens = request, tokens
        self._choices: dict[int, TextChoice] = {}  # choices that have begun
        self._ended: set[int] = set()
        self._outputs: dict[int, RequestOutput] = {}

    def frames(self, output: RequestOutput) -> bytes:
        """Return the frames of an output of one prompt, which has its number: one per choice that has new values."""
        if output.finished:
            self._outputs[output.prompt_index] = output
        return encoded("".join([self._frames(output, completion) for completion in output.outputs]))

    def size(self, output: RequestOutput) -> int:
        is_first = output.prompt_index * self._request.params.n + output.outputs[0].index not in self._choices
        return num_values([output]) if self._request.echo and is_first else num_new_values(output)

    def end(self) -> bytes:
        return self._chunks.end(self._outputs.values())

    def _frames(self, output: RequestOutput, completion: CompletionOutput) -> str:
        index = output.prompt_index * self._request.params.n + completion.index
        text, reason = completion.new_text, completion.finish_reason
        choice = self._choices.get(index)
        beginning = ""
        if choice is None:
            choice = self._choices[index] = TextChoice(self._request, output, self._tokens)
            beginning = choice.beginning
        is_final = reason is not None
        found = choice.logprobs(text, completion.new_token_ids, completion.new_logprobs, is_final=is_final)
        text = beginning + text
        has_news = text or (found is not None and found["tokens"]) or reason is not None
        if index in self._ended or not has_news:
            return ""
        if reason is not None:
            self._ended.add(index)
        return self._chunks.chunk(index, f'"text":{encode_basestring(text)}', found, reason)


def error_frame(body: Body) -> bytes:
    """Return the frame that ends a failed stream."""
    return encoded(f"data: {_json(body)}\n\n")


def _delta(events: Iterable[Event]) -> str:
    """Return the part of a message that some events add, as one object."""
    texts: dict[str, str] = {}
    calls: dict[int, Body] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                texts["content"] = texts.get("content", "") + text
            case ReasoningDelta(text):
                texts["reasoning_content"] = texts.get("reasoning_content", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ArgumentsDelta(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    fields = [f'"{name}":{encode_basestring(text)}' for name, text in texts.items()]
    if calls:
        fields.append(f'"tool_calls":{_json(list(calls.values()))}')
    return f"{{{','.join(fields)}}}"


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def _of_items(body: Body | None) -> str:
    """Return log-probabilities as JSON. Each item is encoded alone, because the encoder does not release the
    interpreter lock.
    """
    if body is None:
        return "null"
    return f"{{{','.join(f'{_json(name)}:{_of_list(items)}' for name, items in body.items())}}}"


def _of_list(items: list[Any] | None) -> str:
    return "null" if items is None else f"[{','.join(map(_json, items))}]"
