"""Anthropic's Messages and OpenAI's stateless Responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foreword.anthropic import PING, MessageStream, error_body, message_body, parse_count, parse_messages
from foreword.engine import RequestOutput
from foreword.engine.chat import make_chat
from foreword.openai import ResponsesRequest, ResponseStream, parse_responses, response_body
from foreword.openai.request import ChatRequest
from foreword.server.context import Context
from foreword.server.errors import DIALECTS, Dialect
from foreword.server.events import COMMENT, EventStream
from foreword.server.generation import Generation, num_values
from foreword.server.openapi import Body, Operation
from foreword.server.reply import apart, built_reply, is_small, json_body, parsed, reply

T = TypeVar("T", ChatRequest, ResponsesRequest)

DIALECTS["/v1/messages"] = Dialect(lambda error: error_body(error.status, str(error)), event="error")

COUNT = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}
MESSAGES = {**COUNT, "max_tokens": 16}
RESPONSES = {"input": "Hello", "max_output_tokens": 16}
"""Examples of bodies."""


class Frames(Protocol):
    """The stream of one answer."""

    def frames(self, output: RequestOutput) -> bytes: ...


def routes_of(context: Context) -> list[Operation]:
    """/v1/messages, /v1/messages/count_tokens, /v1/responses."""

    async def messages(request: Request) -> Response:
        """The answer to a conversation, in Anthropic's form."""
        return await _answer(context, request, parse_messages, MessageStream, message_body, sign_of_life=PING)

    async def responses(request: Request) -> Response:
        """The answer to a conversation, in the form of OpenAI's Responses."""
        return await _answer(context, request, parse_responses, ResponseStream, response_body)

    async def count_tokens(request: Request) -> Response:
        """The number of tokens of a conversation, in Anthropic's form."""
        wanted = await parsed(parse_count, await json_body(request), request)
        context.check_model(wanted.model)
        limit = context.config.max_prompt_tokens
        arguments = context.tokenizer, wanted.messages, wanted.params, limit, wanted.chat, context.media
        takes_time = not is_small(request) or context.media.encoder is not None
        made = await apart(takes_time, make_chat, *arguments)
        return reply({"input_tokens": len(made.token_ids)})

    return [
        Operation("/v1/messages", messages, Body(parse_messages, MESSAGES, generates=True)),
        Operation("/v1/messages/count_tokens", count_tokens, Body(parse_count, COUNT)),
        Operation("/v1/responses", responses, Body(parse_responses, RESPONSES, generates=True)),
    ]


async def _answer(
    context: Context,
    request: Request,
    parse: Callable[[object], T],
    stream_of: Callable[..., Frames],
    body_of: Callable[..., dict[str, Any]],
    *,
    sign_of_life: bytes = COMMENT,
) -> Response:
    """The answer to one conversation, whole or as a stream."""
    generation, body = Generation(context, request), await json_body(request)
    await generation.limit_time(body)
    wanted = await parsed(parse, body, request)
    chat = wanted.chat if isinstance(wanted, ResponsesRequest) else wanted
    model = generation.choose_model(chat.model)
    generation.enter(chat.params)
    field = "messages" if wanted is chat else "input"
    job = await generation.chat(chat.messages, chat.params, chat.chat, chat.options, stream=chat.stream, field=field)
    named = {"response_id": generation.id, "created": int(time.time()), "model": model}
    if not chat.stream:
        (output,) = await generation.finals([job])
        return await built_reply(num_values([output]), body_of, wanted, output, **named)
    stream = stream_of(wanted, **named)
    if isinstance(stream, ResponseStream):
        request.scope["failure"] = lambda error: stream.failed(str(error))

    async def frames() -> AsyncGenerator[bytes, None]:
        async for output in generation.outputs([job]):
            yield stream.frames(output)
        generation.leave()

    return EventStream(frames(), keep_alive=context.config.keep_alive, sign_of_life=sign_of_life)
