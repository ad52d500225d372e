"""Convert the outputs of the engine to Ollama's bodies: one object, or lines of JSON as the outputs arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import ClassVar, Unpack

from foreword.engine import CompletionOutput, RequestOutput
from foreword.engine.pooling import PoolingRequestOutput
from foreword.messages import ContentDelta, Message, ReasoningDelta, ToolCall
from foreword.ollama.request import EmbedRequest, GenerateRequest
from foreword.openai.frames import ESCAPE, LINES, AnswerStream
from foreword.openai.response import Body, Named, num_new_values

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


def line(body: Body) -> bytes:
    """Return a body as a line of a stream. Characters at which some clients end a line are escaped."""
    text = _encode(body)
    if not text.isascii():
        text = text.translate(_SEPARATORS)
    return f"{text}\n".encode(errors=ESCAPE)


_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def error_body(message: str) -> Body:
    """Return the body of an error in Ollama's form."""
    return {"error": message}


def answer_body(request: GenerateRequest, output: RequestOutput, **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /api/chat or /api/generate without a stream."""
    (completion,) = output.outputs
    message = completion.message or Message(completion.text)
    text, calls = message.content or "", [_call(call) for call in message.tool_calls]
    return {**_head(named), **_part(request, text, message.reasoning or "", calls), **_end(output, completion)}


def state_body(request: GenerateRequest, model: str, reason: str) -> Body:
    """Return the body of an answer to a request without a prompt. reason: "load" or "unload", its effect on the
    model.
    """
    found: Body = {"model": model, "created_at": _now(), **_part(request, "", "", [])}
    return {**found, "done": True, "done_reason": reason}


class LineStream(AnswerStream[RequestOutput]):
    """The lines of an answer. Tool calls are in one line before the last line."""

    keep_alive: ClassVar[bytes] = b""  # none, because clients parse every line as JSON
    media_type: ClassVar[str] = LINES

    def __init__(self, request: GenerateRequest, **named: Unpack[Named]) -> None:
        self._request, self._named = request, named

    def frames(self, output: RequestOutput) -> bytes:
        (completion,) = output.outputs
        text = thinking = ""
        if self._request.chat is None:
            text = completion.new_text
        for event in completion.events:
            if isinstance(event, ContentDelta):
                text += event.text
            elif isinstance(event, ReasoningDelta):
                thinking += event.text
        message = completion.message
        calls = [] if message is None else [_call(call) for call in message.tool_calls]
        found = b""
        if text or thinking or calls:
            part = _part(self._request, text, thinking, calls)
            found = line({**_head(self._named), **part, "done": False})
        if output.finished:
            part = _part(self._request, "", "", [])
            found += line({**_head(self._named), **part, **_end(output, completion)})
        return found

    def size(self, output: RequestOutput) -> int:
        return num_new_values(output)


def embed_body(request: EmbedRequest, outputs: Sequence[PoolingRequestOutput], **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /api/embed."""
    return {
        "model": named["model"],
        "embeddings": [output.outputs.data.tolist() for output in outputs],
        "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
    }


def embeddings_body(request: EmbedRequest, outputs: Sequence[PoolingRequestOutput], **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /api/embeddings."""
    return {"embedding": outputs[0].outputs.data.tolist()}


def _head(named: Named) -> Body:
    return {"model": named["model"], "created_at": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _part(request: GenerateRequest, text: str, thinking: str, calls: list[Body]) -> Body:
    """Return the content of an answer, or of a piece of it."""
    thought = {"thinking": thinking} if thinking else {}
    if not request.of_chat:
        return {"response": text, **thought}
    return {"message": {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}}


def _call(call: ToolCall) -> Body:
    """Return a call. If the arguments are not a JSON object, their text is the value of "arguments". (If calls are
    required, a grammar prevents this.)
    """
    arguments = {"arguments": call.arguments} if call.error is not None else json.loads(call.arguments)
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _end(output: RequestOutput, completion: CompletionOutput) -> Body:
    """Return why an answer ended, its token counts, and the times that were measured, in nanoseconds."""
    metrics, reason = output.metrics, completion.finish_reason
    times = {
        "total_duration": metrics.e2e_latency,
        "prompt_eval_duration": _between(metrics.first_scheduled_time, metrics.first_token_time),
        "eval_duration": _between(metrics.first_token_time, metrics.finished_time),
    }
    return {
        "done": True,
        "done_reason": None if reason is None else _REASONS[reason],
        "prompt_eval_count": len(output.prompt_token_ids),
        "eval_count": completion.num_tokens,
        **{name: round(1e9 * seconds) for name, seconds in times.items() if seconds is not None},
    }


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(end - begin, 0.0)
