"""Operations of the tokenizer, with vLLM's bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.thinking import TemplateReads
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, STRING, Fields
from foreword.media.parts import media_parts
from foreword.models.tokenizer import Tokenizer
from foreword.openai.errors import named
from foreword.openai.request import IDS, MESSAGES, OF_TEMPLATE, template_variables, tools_of
from foreword.server.context import Context
from foreword.server.operation import Body, Operation
from foreword.server.reply import apart, built, is_small, reply


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A body of /tokenize. text: of the prompt; None: the messages are made one. template: arguments of that;
    variables: further ones of the template. parses_special: special tokens in the text are read as such. of_llama: the
    answer has llama.cpp's form.
    """

    model: str | None
    text: str | None
    messages: list[dict[str, Any]] | None
    template: dict[str, Any]
    variables: dict[str, Any]
    special: bool
    with_texts: bool
    parses_special: bool = True
    of_llama: bool = False

    def rendered(self, tokenizer: Tokenizer) -> str:
        """Return the text of the prompt. Raise RequestError for messages with an image or sound."""
        if self.text is not None:
            return self.text
        for field, kind, part in media_parts(self.messages):
            reason = f"this route takes text only, and the part is {kind}"
            raise RequestError(None, field, part["type"], reason, "Leave it out.")
        read = tokenizer.template_variables(tools=bool(self.template.get("tools")))
        with named("messages", OF_TEMPLATE):
            TemplateReads(read, thinks=False).check(self.variables)
        return tokenizer.apply_chat_template(self.messages or [], **self.template, **self.variables)

    def encode(self, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        """Return the tokens. Raise RequestError for a text that certainly has more than ``max_tokens``."""
        text, special = self.rendered(tokenizer), self.parses_special
        return tokenizer.encode(text, add_special_tokens=self.special, parse_special=special, max_tokens=max_tokens)


def parse_tokenize(body: object) -> TokenizeRequest:
    """Return the request in a body of vLLM's form or, with ``content``, of llama.cpp's.

    Raise RequestError for a body of which it is not clear what is to be tokenized.
    """
    fields = Fields(body)
    if (content := fields.take("content", STRING)) is not None:
        return _of_llama(fields, content)
    messages, text = fields.take("messages", MESSAGES), fields.take("prompt", STRING)
    if (messages is None) == (text is None):
        raise RequestError(None, "prompt", text, "is one of prompt and messages", "Give exactly one of them.")
    of_template = {"tools": tools_of(fields), "add_generation_prompt": fields.take("add_generation_prompt", BOOLEAN)}
    variables = template_variables(fields)
    chosen = {name: value for name, value in of_template.items() if value is not None}
    of_messages = {**chosen, **({"chat_template_kwargs": variables} if variables else {})}
    for name, value in of_messages.items() if messages is None else ():
        raise RequestError(None, name, value, "needs messages", "Leave it out.")
    request = TokenizeRequest(
        model=fields.take("model", STRING),
        text=text,
        messages=messages,
        template={"add_generation_prompt": True, **chosen},
        variables=variables,
        special=fields.take("add_special_tokens", BOOLEAN, messages is None),
        with_texts=fields.take("return_token_strs", BOOLEAN, False),
    )
    fields.end()
    return request


def _of_llama(fields: Fields, content: str) -> TokenizeRequest:
    request = TokenizeRequest(
        model=fields.take("model", STRING),
        text=content,
        messages=None,
        template={},
        variables={},
        special=fields.take("add_special", BOOLEAN, False),
        with_texts=fields.take("with_pieces", BOOLEAN, False),
        parses_special=fields.take("parse_special", BOOLEAN, True),
        of_llama=True,
    )
    fields.end()
    return request


def parse_apply(body: object) -> TokenizeRequest:
    """Return the conversation in a body of /apply-template. Raise RequestError if there is none."""
    request = parse_tokenize(body)
    if request.messages is None:
        raise RequestError(None, "messages", None, "is missing", "Give a list of messages.")
    return request


def parse_detokenize(body: object) -> tuple[str | None, list[int]]:
    """Return the model and the token ids in a body of /detokenize."""
    fields = Fields(body)
    model, ids = fields.take("model", STRING), fields.require("tokens", IDS)
    fields.end()
    return model, ids


TOKENIZE = Body(parse_tokenize, {"prompt": "Hello"})
APPLY = Body(parse_apply, {"messages": [{"role": "user", "content": "Hello"}]})
DETOKENIZE = Body(parse_detokenize, {"tokens": [0]})


async def _tokenize(context: Context, request: Request) -> Response:
    wanted = await TOKENIZE.read(request)
    context.check_model(wanted.model)
    ids = await apart(not is_small(request), wanted.encode, context.tokenizer, context.config.max_prompt_tokens)
    made = _encoded_for_llama if wanted.of_llama else _encoded
    return await built(len(ids), made, context, ids, wanted.with_texts)


def _encoded_for_llama(context: Context, ids: list[int], with_texts: bool) -> Response:
    if not with_texts:
        return reply({"tokens": ids})
    return reply({"tokens": [{"id": i, "piece": token_text(context.tokenizer, i)} for i in ids]})


async def _apply_template(context: Context, request: Request) -> Response:
    wanted = await APPLY.read(request)
    context.check_model(wanted.model)
    return reply({"prompt": await apart(not is_small(request), wanted.rendered, context.tokenizer)})


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

    def decoded() -> Response:
        text = decode(ids, skip_special_tokens=False)
        return reply({"prompt": text, "content": text})  # vLLM's name, llama.cpp's

    return await built(len(ids), decoded)


async def _info(context: Context, request: Request) -> Response:
    tokenizer = context.tokenizer
    return reply(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template() or None,
            "bos_token": token_text(tokenizer, tokenizer.bos_id),
            "eos_token": token_text(tokenizer, next(iter(tokenizer.eos_ids), None)),
            "pad_token": None,
            "unk_token": None,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.engine.engine.states.max_model_len,
            "additional_special_tokens": list(tokenizer.special_token_ids),
        }
    )


def token_text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    """Return the text of a token; None for None."""
    return None if token_id is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


# fmt: off
OPERATIONS = (
    Operation(
        "/tokenize", _tokenize, TOKENIZE,
        access="key", summary="Tokenize a text or a conversation (vLLM, llama.cpp).",
        details="Give `prompt` or `messages`. With llama.cpp's `content` instead, the answer has llama.cpp's form.",
    ),
    Operation(
        "/detokenize", _detokenize, DETOKENIZE, access="key", summary="Decode token ids into text (vLLM, llama.cpp)."
    ),
    Operation(
        "/apply-template", _apply_template, APPLY,
        access="key", summary="Return the prompt that the chat template makes from a conversation (llama.cpp).",
    ),
    Operation("/tokenizer_info", _info, access="key", summary="Describe the tokenizer (vLLM)."),
)
