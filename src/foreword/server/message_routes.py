"""Anthropic's operations: messages, and the count of their tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from foreword.anthropic import MessageStream, message_body, parse_count, parse_messages
from foreword.engine import RequestOutput
from foreword.engine.chat import num_chat_tokens
from foreword.openai import ChatRequest
from foreword.openai.errors import named
from foreword.openai.frames import EVENTS
from foreword.openai.response import num_values
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.errors import ANTHROPIC
from foreword.server.operation import JSON, Body, Operation
from foreword.server.reply import apart, is_small, reply

EXAMPLE = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}
MESSAGES: Api[ChatRequest, RequestOutput] = Api(
    body=Body(parse_messages, {**EXAMPLE, "max_tokens": 16}, timeout=True, samples=True),
    run=lambda generation, wanted: generation.chat(wanted),
    whole=lambda context, wanted, outputs, named: reply(message_body(wanted, outputs[0], **named)),
    size=num_values,
    stream=lambda context, wanted, named: MessageStream(wanted, **named) if wanted.stream else None,
)
COUNT = Body(parse_count, EXAMPLE)


async def _count_tokens(context: Context, request: Request) -> Response:
    wanted = await COUNT.read(request)
    context.check_model(wanted.model)
    limit = context.config.max_prompt_tokens
    arguments = context.tokenizer, wanted.messages, wanted.params, limit, wanted.chat, context.media
    takes_time = not is_small(request) or context.media.encoder is not None
    with named("messages", wanted.origins):
        count = await apart(takes_time, num_chat_tokens, *arguments)
    return reply({"input_tokens": count})


# fmt: off
OPERATIONS = (
    Operation(
        "/v1/messages", MESSAGES, MESSAGES.body,
        access="key", summary="Answer a conversation (Anthropic Messages).",
        details="With `stream: true` the answer is sent in pieces. It has text, `thinking`, tool use and the number "
        "of cached tokens. Errors have Anthropic's form.",
        errors=ANTHROPIC, media_types=(JSON, EVENTS),
    ),
    Operation(
        "/v1/messages/count_tokens", _count_tokens, COUNT,
        access="key", summary="Count the tokens of a conversation (Anthropic Messages).", errors=ANTHROPIC,
    ),
)
