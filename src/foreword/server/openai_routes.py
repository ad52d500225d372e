"""OpenAI's operations that generate: chat completions and completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from foreword.engine import RequestOutput
from foreword.openai import (
    ChatRequest,
    ChatStream,
    CompletionRequest,
    CompletionStream,
    chat_completion,
    parse_chat,
    parse_completion,
    text_completion,
)
from foreword.openai.frames import EVENTS
from foreword.openai.response import num_values
from foreword.server.answer import Api
from foreword.server.generation import Generation, in_order
from foreword.server.operation import JSON, Body, Operation
from foreword.server.reply import PiecesReply


async def completions(generation: Generation, wanted: CompletionRequest) -> AsyncGenerator[RequestOutput, None]:
    """Check the prompts of a request, and return the outputs of their completions."""
    generation.check_count("prompt", len(wanted.prompts))
    generation.enter(wanted.params, len(wanted.prompts))
    wanted = wanted.filled(generation.context.tokenizer, generation.context.engine.engine.states.max_model_len)
    prompts, params = wanted.prompts, [wanted.params] * len(wanted.prompts)
    return generation.outputs(await generation.check("prompt", prompts, params, wanted.options, stream=wanted.stream))


CHAT: Api[ChatRequest, RequestOutput] = Api(
    body=Body(
        parse_chat, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}, timeout=True, samples=True
    ),
    run=lambda generation, wanted: generation.chat(wanted),
    whole=lambda context, wanted, outputs, named: PiecesReply(
        chat_completion(wanted, outputs[0], context.tokenizer, listed=iter, **named)
    ),
    size=num_values,
    stream=lambda context, wanted, named: ChatStream(wanted, context.tokenizer, **named) if wanted.stream else None,
)
COMPLETIONS: Api[CompletionRequest, RequestOutput] = Api(
    body=Body(parse_completion, {"prompt": "Once upon a time", "max_tokens": 16}, timeout=True, samples=True),
    run=completions,
    whole=lambda context, wanted, outputs, named: PiecesReply(
        text_completion(wanted, in_order(outputs), context.tokenizer, listed=iter, **named)
    ),
    size=num_values,
    stream=lambda context, wanted, named: (
        CompletionStream(wanted, context.tokenizer, **named) if wanted.stream else None
    ),
)

# fmt: off
OPERATIONS = (
    Operation(
        "/v1/chat/completions", CHAT, CHAT.body,
        access="key", summary="Answer a conversation (OpenAI Chat Completions).",
        details="With `stream: true` the answer is sent in pieces. It has content, `reasoning_content`, tool calls "
        "and log-probabilities. `n` asks for several answers.",
        media_types=(JSON, EVENTS),
    ),
    Operation(
        "/v1/completions", COMPLETIONS, COMPLETIONS.body,
        access="key", summary="Complete one or more prompts (OpenAI Completions).",
        details="Prompts are texts or token ids. `echo`, `n`, `best_of` and `logprobs` are supported, and `suffix` "
        "if the model has tokens for a gap.",
        media_types=(JSON, EVENTS),
    ),
)
