"""OpenAI's routes that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from foreword.openai import (
    ChatStream,
    CompletionStream,
    Named,
    chat_completion,
    parse_chat,
    parse_completion,
    text_completion,
)
from foreword.server.context import Context
from foreword.server.events import EventStream
from foreword.server.generation import Generation, Job, num_values
from foreword.server.openapi import Body, Operation
from foreword.server.reply import built_reply, json_body, parsed

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 16}
"""Examples of bodies."""


def routes_of(context: Context) -> list[Operation]:
    """/v1/chat/completions, /v1/completions."""

    async def chat(request: Request) -> Response:
        """The answer to a conversation, in OpenAI's form."""
        generation, body = Generation(context, request), await json_body(request)
        await generation.limit_time(body)
        wanted = await parsed(parse_chat, body, request)
        model = generation.choose_model(wanted.model)
        generation.enter(wanted.params)
        job = await generation.chat(wanted.messages, wanted.params, wanted.chat, wanted.options, stream=wanted.stream)
        named = Named(response_id=generation.id, created=int(time.time()), model=model)
        if wanted.stream:
            return _stream(context, generation, [job], ChatStream(wanted, context.tokenizer, **named))
        (output,) = await generation.finals([job])
        return await built_reply(num_values([output]), chat_completion, wanted, output, context.tokenizer, **named)

    async def completions(request: Request) -> Response:
        """How prompts go on, in OpenAI's form."""
        generation, body = Generation(context, request), await json_body(request)
        await generation.limit_time(body)
        wanted = await parsed(parse_completion, body, request)
        model = generation.choose_model(wanted.model)
        generation.enter(wanted.params, len(wanted.prompts))
        jobs = await generation.texts(wanted.prompts, wanted.params, wanted.options, stream=wanted.stream)
        named = Named(response_id=generation.id, created=int(time.time()), model=model)
        if wanted.stream:
            return _stream(context, generation, jobs, CompletionStream(wanted, context.tokenizer, **named))
        outputs = await generation.finals(jobs)
        return await built_reply(num_values(outputs), text_completion, wanted, outputs, context.tokenizer, **named)

    return [
        Operation("/v1/chat/completions", chat, Body(parse_chat, CHAT, generates=True)),
        Operation("/v1/completions", completions, Body(parse_completion, COMPLETION, generates=True)),
    ]


def _stream(
    context: Context, generation: Generation, jobs: Sequence[Job], stream: ChatStream | CompletionStream
) -> Response:
    async def frames() -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.outputs(jobs)) as outputs:
            async for output in outputs:
                yield stream.frames(output)
        generation.leave()
        yield stream.end()

    return EventStream(frames(), keep_alive=context.config.keep_alive)
