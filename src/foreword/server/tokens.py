"""Operations of the tokenizer, with vLLM's bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.thinking import TemplateReads
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, STRING, Fields
from foreword.models.tokenizer import Tokenizer
from foreword.openai.errors import named
from foreword.openai.request import IDS, MESSAGES, OF_TEMPLATE, template_variables, tools_of
from foreword.server.context import Context
from foreword.server.operation import Body, Operation
from foreword.server.reply import apart, built, is_small, reply


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A body of /tokenize. text: of the prompt; None: the messages are made one. template: arguments of that;
    variables: further ones of the template.
    """

    model: str | None
    text: str | None
    messages: list[dict[str, Any]] | None
    template: dict[str, Any]
    variables: dict[str, Any]
    special: bool
    with_texts: bool

    def encode(self, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        """Return the tokens. RequestError for a text that certainly has more than ``max_tokens``."""
        text = self.text
        if text is None:
            read = tokenizer.template_variables(tools=bool(self.template.get("tools")))
            with named("messages", OF_TEMPLATE):
                TemplateReads(read, thinks=False).check(self.variables)
            text = tokenizer.apply_chat_template(self.messages or [], **self.template, **self.variables)
        return tokenizer.encode(text, add_special_tokens=self.special, max_tokens=max_tokens)


def parse_tokenize(body: object) -> TokenizeRequest:
    """RequestError for a body of which it is not clear what is to be tokenized."""
    given = Fields(body)
    messages, text = given.take("messages", MESSAGES), given.take("prompt", STRING)
    if (messages is None) == (text is None):
        raise RequestError(None, "prompt", text, "is one of prompt and messages", "Give exactly one of them.")
    of_template = {"tools": tools_of(given), "add_generation_prompt": given.take("add_generation_prompt", BOOLEAN)}
    variables = template_variables(given)
    chosen = {name: value for name, value in of_template.items() if value is not None}
    of_messages = {**chosen, **({"chat_template_kwargs": variables} if variables else {})}
    for name, value in of_messages.items() if messages is None else ():
        raise RequestError(None, name, value, "needs messages", "Leave it out.")
    request = TokenizeRequest(
        model=given.take("model", STRING),
        text=text,
        messages=messages,
        template={"add_generation_prompt": True, **chosen},
        variables=variables,
        special=given.take("add_special_tokens", BOOLEAN, messages is None),
        with_texts=given.take("return_token_strs", BOOLEAN, False),
    )
    given.end()
    return request


def parse_detokenize(body: object) -> tuple[str | None, list[int]]:
    """Return the model and the token ids in a body of /detokenize."""
    given = Fields(body)
    model, ids = given.take("model", STRING), given.require("tokens", IDS)
    given.end()
    return model, ids


TOKENIZE = Body(parse_tokenize, {"prompt": "Hello"})
DETOKENIZE = Body(parse_detokenize, {"tokens": [0]})


async def _tokenize(context: Context, request: Request) -> Response:
    wanted = await TOKENIZE.read(request)
    context.check_model(wanted.model)
    ids = await apart(not is_small(request), wanted.encode, context.tokenizer, context.config.max_prompt_tokens)
    return await built(len(ids), _encoded, context, ids, wanted.with_texts)


def _encoded(context: Context, ids: list[int], with_texts: bool) -> Response:
    texts = [context.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids] if with_texts else None
    longest = context.engine.engine.states.max_model_len
    return reply({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts})


async def _detokenize(context: Context, request: Request) -> Response:
    model, ids = await DETOKENIZE.read(request)
    context.check_model(model)
    vocab_size = context.engine.engine.states.vocab_size
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            reason = f"must be in [0, {vocab_size - 1}], the vocabulary has {vocab_size} tokens"
            raise RequestError(None, f"tokens[{i}]", token, reason, "Use the tokenizer of this model.")
    decode = context.tokenizer.decode
    return await built(len(ids), lambda: reply({"prompt": decode(ids, skip_special_tokens=False)}))


async def _info(context: Context, request: Request) -> Response:
    tokenizer = context.tokenizer
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


def _text(context: Context, token_id: int | None) -> str | None:
    return None if token_id is None else context.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


# fmt: off
OPERATIONS = (
    Operation(
        "/tokenize", _tokenize, TOKENIZE,
        access="key", summary="Tokenize a text or a conversation (vLLM).", details="Give `prompt` or `messages`.",
    ),
    Operation("/detokenize", _detokenize, DETOKENIZE, access="key", summary="Decode token ids into text (vLLM)."),
    Operation("/tokenizer_info", _info, access="key", summary="Describe the tokenizer (vLLM)."),
)
