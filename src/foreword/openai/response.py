"""From the outputs of the engine to OpenAI's response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, TypedDict, Unpack

from foreword import utf8
from foreword.engine import CompletionOutput, RequestOutput
from foreword.errors import ForewordError, ModelError, RequestError
from foreword.messages import Message
from foreword.openai.request import ChatRequest, CompletionRequest
from foreword.sampling import BadLogitsError, TokenLogprobs

Body = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for −∞, which JSON cannot write; OpenAI's value for "too unlikely"."""


class Named(TypedDict):
    """What each body of a response says of it. created: seconds since 1970."""

    response_id: str
    created: int
    model: str


class Tokens(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def chat_completion(request: ChatRequest, output: RequestOutput, tokens: Tokens, **named: Unpack[Named]) -> Body:
    """The body that answers /v1/chat/completions.

    A request that failed (``output.error``) has no such body; see `error_body`.
    """
    choices = [
        {
            "index": completion.index,
            "message": _message(completion),
            "logprobs": chat_logprobs(completion.token_ids, completion.logprobs, request.params.logprobs or 0, tokens),
            "finish_reason": finish_reason(completion),
        }
        for completion in output.outputs
    ]
    return _body("chat.completion", "chatcmpl", named, choices, [output])


def text_completion(
    request: CompletionRequest, outputs: Sequence[RequestOutput], tokens: Tokens, **named: Unpack[Named]
) -> Body:
    """The body that answers /v1/completions. outputs: one per prompt, whose choices follow one another."""
    choices = [
        {
            "index": 0,
            "text": prompt_text(request, output, completion, tokens) + completion.text,
            "logprobs": text_logprobs(
                completion.token_ids,
                completion.logprobs,
                tokens,
                start=0 if request.echo else len(text_of_prompt(output, tokens)),
                prompt=output if request.echo else None,
            ),
            "finish_reason": completion.finish_reason,
        }
        for output in outputs
        for completion in output.outputs
    ]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return _body("text_completion", "cmpl", named, choices, outputs)


def error_body(error: ForewordError) -> tuple[int, Body]:
    """Return the HTTP status and the body for a request that cannot be served: 400 for its own fault and for what the
    model cannot do, such as a conversation without a chat template; else 500.
    """
    status, kind, param = 500, "server_error", None
    if isinstance(error, RequestError) and not isinstance(error, BadLogitsError):
        status, kind, param = 400, "invalid_request_error", error.field
    elif isinstance(error, ModelError):
        status, kind = 400, "invalid_request_error"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": None}}


def _body(kind: str, prefix: str, named: Named, choices: list[Body], outputs: Sequence[RequestOutput]) -> Body:
    return {**head(kind, prefix, named), "choices": choices, "usage": usage(outputs)}


def head(kind: str, prefix: str, named: Named) -> Body:
    """The fields that bodies and chunks begin with."""
    response_id = f"{prefix}-{named['response_id']}"
    return {"id": response_id, "object": kind, "created": named["created"], "model": named["model"]}


def _message(completion: CompletionOutput) -> Body:
    """The message of a chat: its content is null if it has only tool calls."""
    message = completion.message or Message(completion.text)
    found = {**message.as_dict(), "refusal": None}
    if message.tool_calls and not message.content:
        found["content"] = None
    return found


def finish_reason(completion: CompletionOutput) -> str | None:
    """Of a choice of a chat."""
    calls = completion.message is not None and completion.message.tool_calls
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def usage(outputs: Sequence[RequestOutput]) -> Body:
    """The number of tokens: of the prompts, those of them that the cache had, of all completions, and of reasoning."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(c.num_tokens for output in outputs for c in output.outputs)
    reasoning = sum(c.reasoning_tokens or 0 for output in outputs for c in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, num_alternatives: int, tokens: Tokens
) -> Body | None:
    """Of tokens of a chat. logprobs: an entry per token, or None."""
    if logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> Body:
        raw = tokens.token_bytes(token_id)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for chosen, found in zip(token_ids, logprobs, strict=False):
        likely = sorted(found, key=lambda token_id: -found[token_id].logprob)[:num_alternatives]
        top = [entry(token_id, found[token_id].logprob) for token_id in likely]
        content.append({**entry(chosen, found[chosen].logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
    tokens: Tokens,
    *,
    start: int,
    prompt: RequestOutput | None,
) -> Body | None:
    """Of tokens of a completion. start: characters before them. prompt: has tokens that come before them."""
    if logprobs is None:
        return None
    ids: list[int] = list(token_ids[: len(logprobs)])
    entries: list[TokenLogprobs | None] = list(logprobs)
    if prompt is not None and prompt.prompt_logprobs is not None:
        ids, entries = prompt.prompt_token_ids + ids, prompt.prompt_logprobs + entries
    by_text = [None if found is None else _by_text(found, tokens) for found in entries]
    texts = [_text(tokens.token_bytes(token_id)) for token_id in ids]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if found is None else _finite(found[chosen].logprob)
            for chosen, found in zip(ids, entries, strict=True)
        ],
        "top_logprobs": by_text,
        "text_offset": list(accumulate(map(len, texts), initial=start))[:-1],
    }


def _by_text(found: TokenLogprobs, tokens: Tokens) -> dict[str, float]:
    """Of tokens with the same text, such as bytes that are no characters, the largest."""
    largest: dict[str, float] = {}
    for token_id, entry in found.items():
        text = _text(tokens.token_bytes(token_id))
        largest[text] = max(largest.get(text, LEAST_LOGPROB), entry.logprob)
    return largest


def prompt_text(request: CompletionRequest, output: RequestOutput, completion: CompletionOutput, tokens: Tokens) -> str:
    """Return what a completion's text begins with, without a character that the completion completes."""
    if not request.echo:
        return ""
    if output.prompt is not None:
        return output.prompt
    text, unfinished = (
        tokens.decode(output.prompt_token_ids),
        utf8.unfinished(tokens.token_bytes, output.prompt_token_ids),
    )
    if unfinished:
        new = b"".join(map(tokens.token_bytes, completion.token_ids[: utf8.LONGEST]))
        if not _text(unfinished + new).startswith(utf8.INVALID):
            return text.removesuffix(utf8.INVALID)
    return text


def text_of_prompt(output: RequestOutput, tokens: Tokens) -> str:
    return tokens.decode(output.prompt_token_ids) if output.prompt is None else output.prompt


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
