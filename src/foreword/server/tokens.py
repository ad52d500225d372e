"""Routes of the tokenizer, with vLLM's bodies: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foreword.fields import BOOLEAN, OBJECT, STRING, Fields
from foreword.openai.request import IDS, MESSAGES, TOOLS
from foreword.server.context import Context
from foreword.server.reply import json_body, reply


def routes_of(context: Context) -> list[Route]:
    """/tokenize, /detokenize, /tokenizer_info."""
    tokenizer = context.tokenizer

    async def tokenize(request: Request) -> Response:
        given = Fields(await json_body(request))
        context.check_model(given.take("model", STRING))
        messages = given.take("messages", MESSAGES)
        text = given.require("prompt", STRING) if messages is None else None
        special = given.take("add_special_tokens", BOOLEAN, messages is None)
        with_texts = given.take("return_token_strs", BOOLEAN, False)
        tools: Any = None
        template: dict[str, Any] = {}
        if messages is not None:
            tools = given.take("tools", TOOLS)
            template = given.take("chat_template_kwargs", OBJECT, {})
            template = {"add_generation_prompt": given.take("add_generation_prompt", BOOLEAN, True), **template}
        given.end()

        def encoded() -> list[int]:
            if messages is None:
                return tokenizer.encode(text or "", add_special_tokens=special)
            prompt = tokenizer.apply_chat_template(messages, tools=tools, **template)
            return tokenizer.encode(prompt, add_special_tokens=special)

        ids = await asyncio.to_thread(encoded)
        texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids] if with_texts else None
        longest = context.engine.engine.states.max_model_len
        return reply({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts})

    async def detokenize(request: Request) -> Response:
        given = Fields(await json_body(request))
        context.check_model(given.take("model", STRING))
        ids = given.require("tokens", IDS)
        given.end()
        return reply({"prompt": await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)})

    async def info(request: Request) -> Response:
        return reply(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "chat_template": tokenizer.chat_template() or None,
                "bos_token": _text(context, tokenizer.bos_id),
                "eos_token": _text(context, next(iter(tokenizer.eos_ids), None)),
                "pad_token": None,
                "unk_token": None,
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": context.engine.engine.states.max_model_len,
                "additional_special_tokens": list(tokenizer.special_token_ids),
            }
        )

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info),
    ]


def _text(context: Context, token_id: int | None) -> str | None:
    return None if token_id is None else context.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
