"""From the outputs of the engine to OpenAI's response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from foreword.engine import CompletionOutput, RequestOutput
from foreword.errors import ForewordError, RequestError
from foreword.messages import Message
from foreword.openai.request import ChatRequest, CompletionRequest
from foreword.sampling import BadLogitsError, TokenLogprobs

Body = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for −∞, which JSON cannot write; OpenAI's value for "too unlikely"."""


class Tokens(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def chat_completion(
    request: ChatRequest, output: RequestOutput, tokens: Tokens, *, response_id: str, created: int, model: str
) -> Body:
    """The body that answers /v1/chat/completions. created: seconds since 1970.

    A request that failed (``output.error``) has no such body; see `error_body`.
    """
    choices = [
        {
            "index": completion.index,
            "message": _message(completion),
            "logprobs": _chat_logprobs(completion, request.params.logprobs or 0, tokens),
            "finish_reason": _finish_reason(completion),
        }
        for completion in output.outputs
    ]
    return _body("chat.completion", f"chatcmpl-{response_id}", created, model, choices, [output])


def text_completion(
    request: CompletionRequest,
    outputs: Sequence[RequestOutput],
    tokens: Tokens,
    *,
    response_id: str,
    created: int,
    model: str,
) -> Body:
    """The body that answers /v1/completions. outputs: one per prompt, whose choices follow one another."""
    choices = [
        {
            "index": 0,
            "text": _prompt_text(request, output, tokens) + completion.text,
            "logprobs": _text_logprobs(request, output, completion, tokens),
            "finish_reason": completion.finish_reason,
        }
        for output in outputs
        for completion in output.outputs
    ]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return _body("text_completion", f"cmpl-{response_id}", created, model, choices, outputs)


def error_body(error: ForewordError) -> tuple[int, Body]:
    """The HTTP status and the body for a request that cannot be served: 400 for its own fault, else 500."""
    status, kind, param = 500, "server_error", None
    if isinstance(error, RequestError) and not isinstance(error, BadLogitsError):
        status, kind, param = 400, "invalid_request_error", error.field
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": None}}


def _body(
    kind: str, response_id: str, created: int, model: str, choices: list[Body], outputs: Sequence[RequestOutput]
) -> Body:
    return {
        "id": response_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(outputs),
    }


def _message(completion: CompletionOutput) -> Body:
    """The message of a chat: its content is null if it has only tool calls."""
    message = completion.message or Message(completion.text)
    found = {**message.as_dict(), "refusal": None}
    if message.tool_calls and not message.content:
        found["content"] = None
    return found


def _finish_reason(completion: CompletionOutput) -> str | None:
    calls = completion.message is not None and completion.message.tool_calls
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def usage(outputs: Sequence[RequestOutput]) -> Body:
    """The number of tokens: of the prompts, those of them that the cache had, and of all completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs)},
    }


def _chat_logprobs(completion: CompletionOutput, num_alternatives: int, tokens: Tokens) -> Body | None:
    if completion.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> Body:
        raw = tokens.token_bytes(token_id)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for chosen, found in zip(completion.token_ids, completion.logprobs, strict=False):
        likely = sorted(found, key=lambda token_id: -found[token_id].logprob)[:num_alternatives]
        top = [entry(token_id, found[token_id].logprob) for token_id in likely]
        content.append({**entry(chosen, found[chosen].logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _text_logprobs(
    request: CompletionRequest, output: RequestOutput, completion: CompletionOutput, tokens: Tokens
) -> Body | None:
    if completion.logprobs is None:
        return None
    ids: list[int] = list(completion.token_ids[: len(completion.logprobs)])
    entries: list[TokenLogprobs | None] = list(completion.logprobs)
    if request.echo and output.prompt_logprobs is not None:
        ids, entries = output.prompt_token_ids + ids, output.prompt_logprobs + entries
    by_text = [
        None if found is None else {_text(tokens.token_bytes(i)): _finite(found[i].logprob) for i in found}
        for found in entries
    ]
    texts = [_text(tokens.token_bytes(token_id)) for token_id in ids]
    start = 0 if request.echo else len(_text_of_prompt(output, tokens))
    return {
        "tokens": texts,
        "token_logprobs": [
            None if found is None else _finite(found[chosen].logprob)
            for chosen, found in zip(ids, entries, strict=True)
        ],
        "top_logprobs": by_text,
        "text_offset": list(accumulate(map(len, texts), initial=start))[:-1],
    }


def _prompt_text(request: CompletionRequest, output: RequestOutput, tokens: Tokens) -> str:
    return _text_of_prompt(output, tokens) if request.echo else ""


def _text_of_prompt(output: RequestOutput, tokens: Tokens) -> str:
    return tokens.decode(output.prompt_token_ids) if output.prompt is None else output.prompt


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
