"""Parse the body of a request of Ollama's interface into a prompt and `SamplingParams`.

A field that is null counts as absent. An unknown or unsupported field, a value of a wrong type, and an option that
cannot be applied raise a RequestError with the path of the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.batch import Origin, PoolingParams, SamplingParams, StructuredOutputs
from foreword.engine import RequestOptions
from foreword.engine.chat import ChatOptions
from foreword.errors import ContextLengthError, RequestError
from foreword.fields import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, STRINGS, Fields, Neutral, either, list_of, one_of
from foreword.openai.conversation import Conversation
from foreword.openai.llama import check_last_n
from foreword.openai.request import (
    NOTHING,
    OF_TEMPLATE,
    SAMPLING,
    ChatRequest,
    CompletionRequest,
    Suggested,
    limit_of,
    params_of,
    tools_of,
)

DEFAULTS: Suggested = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, for requests that leave them open and models that suggest nothing. Its repetition penalty is not among
them: it is of the last 64 tokens there, and of the whole prompt here.
"""
_OTHERWISE = ("n", "best_of", "stop", "structured_outputs")
"""Fields of `SamplingParams` that are no options, or have other values there."""
_OF_CHAT = {"thinking": "think", "reasoning_effort": "think", **OF_TEMPLATE}
"""Options of a chat → the fields that they come from."""
_OF_PROMPTS = {"num_keep": INTEGER}
"""Options that hold whatever their value is: a prompt is never cut."""
_NEUTRAL_OPTIONS: Neutral = {
    "embedding_only": (False,),
    "f16_kv": (True,),
    "logits_all": (False,),
    "low_vram": (False,),
    "main_gpu": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5.0,),
    "n": (1,),
    "best_of": (1,),
    "num_batch": (),
    "num_gpu": (0, -1),
    "num_thread": (0,),
    "numa": (False,),
    "penalize_newline": (False,),
    "tfs_z": (1.0,),
    "use_mlock": (False,),
    "use_mmap": (True,),
    "vocab_only": (False,),
}
_NEUTRAL: Neutral = {"logprobs": (False,), "top_logprobs": (0,), "truncate": (False,), "shift": (False,)}
_NEUTRAL_GENERATE: Neutral = {**_NEUTRAL, "context": ([],), "template": ("",), "width": (), "height": (), "steps": ()}
_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_IMAGES = list_of(STRING, "a list of images in base64")
_THINK = either(BOOLEAN, one_of("low", "medium", "high"))
_FORMAT = either(STRING, OBJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """The body of /api/chat or /api/generate.

    chat: the conversation. completion: the prompt, if it is raw or has a suffix. If both are absent, the model is to be
    loaded or unloaded. text: the prompt for a model without a chat template, which takes it unchanged. num_ctx: the
    maximum number of tokens of prompt and answer together, which the options of both also have. keep_alive: seconds,
    below 0 for ever; None: the server's setting. of_chat: the answer has a message.
    """

    model: str | None
    chat: ChatRequest | None = None
    completion: CompletionRequest | None = None
    text: CompletionRequest | None = None
    num_ctx: int | None = None
    keep_alive: float | None = None
    stream: bool = True
    of_chat: bool = True

    def fitted(self, has_template: bool) -> GenerateRequest:
        """Return the request for a model with or without a chat template."""
        if has_template or self.text is None:
            return self
        return replace(self, chat=None, completion=self.text)


def _of_context(num_ctx: int | None) -> RequestOptions:
    """Return the options of a request that may have this many tokens."""
    return RequestOptions() if num_ctx is None else RequestOptions(max_len=num_ctx)


def too_long(num_ctx: int, error: ContextLengthError, *, is_embedded: bool = False) -> ContextLengthError:
    """Return the error of a prompt that ``num_ctx`` leaves no room for, in the words of its client. is_embedded: no
    answer follows it.
    """
    what, why = ("input", "truncate is false") if is_embedded else ("prompt", "prompts are not cut")
    reason = f"the {what} has {error.num_tokens} tokens or more, and {why}"
    fix = f"Give at least {error.num_tokens + (not is_embedded)}, or shorten the {what}."
    return ContextLengthError(
        error.request_id, "options.num_ctx", num_ctx, reason, fix,
        num_tokens=error.num_tokens, longest=error.longest, max_model_len=error.max_model_len,
    )  # fmt: skip


def check_num_ctx(num_ctx: int | None, max_model_len: int) -> None:
    """Raise RequestError if the server's requests cannot have this many tokens."""
    if num_ctx is not None and num_ctx > max_model_len:
        reason = f"requests of this server have at most {max_model_len} tokens"
        fix = "Give at most that, or start the server with another --max-model-len."
        raise RequestError(None, "options.num_ctx", num_ctx, reason, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """The body of /api/embed or /api/embeddings."""

    model: str | None
    prompts: list[str | list[int]]
    params: PoolingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    num_ctx: int | None = None
    keep_alive: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The body of /api/show, /api/pull or /api/delete."""

    model: str
    stream: bool = True


def parse_chat(body: object, suggested: Suggested = NOTHING) -> GenerateRequest:
    """Parse a body of /api/chat. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    params, num_ctx = _params(fields, suggested)
    conversation = _Messages()
    for message in fields.nested_list("messages") or ():
        conversation.add(message)
    tools, asked, stream = tools_of(fields), _thinking(fields), fields.take("stream", BOOLEAN, True)
    chat = ChatRequest(
        model=None,
        messages=conversation.messages,
        params=params,
        chat=ChatOptions(tools=tools, **asked),  # type: ignore[typeddict-item]
        options=_of_context(num_ctx),
        stream=stream,
        origins={**_OF_CHAT, **conversation.origins},
    )
    request = GenerateRequest(
        model=fields.require("model", STRING),
        chat=chat if conversation.messages else None,
        num_ctx=num_ctx,
        keep_alive=_keep_alive(fields),
        stream=stream,
    )
    fields.end(_NEUTRAL)
    return request


def parse_generate(body: object, suggested: Suggested = NOTHING) -> GenerateRequest:
    """Parse a body of /api/generate. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    params, num_ctx = _params(fields, suggested)
    prompt, suffix, system = (fields.take(name, STRING, "") for name in ("prompt", "suffix", "system"))
    raw, images = fields.take("raw", BOOLEAN, False), fields.take("images", _IMAGES, [])
    stream, asked = fields.take("stream", BOOLEAN, True), _thinking(fields)
    chat = completion = text = None
    if raw or suffix:
        for name, value in {"system": system, "images": images, "think": asked}.items():
            if value:
                reason = "is given with raw: true" if raw else "is given with a suffix"
                raise RequestError(None, name, value, reason, "Leave one of them out.")
        completion = CompletionRequest(
            model=None, prompts=[prompt], params=params, options=_of_context(num_ctx), suffix=suffix, stream=stream
        )
    elif prompt or images:
        conversation = Conversation()
        if system:
            conversation.text("system", system, "system")
        for i, image in enumerate(images):
            conversation.image("user", _data_url(image), f"images[{i}]")
        conversation.text("user", prompt, "prompt")
        chat = ChatRequest(
            model=None,
            messages=conversation.messages,
            params=params,
            chat=ChatOptions(**asked),  # type: ignore[typeddict-item]
            options=_of_context(num_ctx),
            stream=stream,
            origins={**_OF_CHAT, **conversation.origins},
        )
        if not system and not images and not asked:
            text = CompletionRequest(
                model=None, prompts=[prompt], params=params, options=_of_context(num_ctx), stream=stream
            )
    request = GenerateRequest(
        model=fields.require("model", STRING),
        chat=chat,
        completion=completion,
        text=text,
        num_ctx=num_ctx,
        keep_alive=_keep_alive(fields),
        stream=stream,
        of_chat=False,
    )
    fields.end(_NEUTRAL_GENERATE)
    return request


def parse_embed(body: object) -> EmbedRequest:
    """Parse a body of /api/embed. ``truncate`` is true by default, as in Ollama: the end of a long text is cut off."""
    fields = Fields(body)
    texts = fields.require("input", either(STRING, STRINGS))
    cut, dimensions = fields.take("truncate", BOOLEAN, True), fields.take("dimensions", INTEGER)
    num_ctx = _num_ctx(fields)
    request = EmbedRequest(
        model=fields.require("model", STRING),
        prompts=[texts] if isinstance(texts, str) else texts,
        params=_embedding(truncate=cut, dimensions=dimensions or None),
        options=_of_context(num_ctx),
        num_ctx=num_ctx,
        keep_alive=_keep_alive(fields),
    )
    fields.end()
    return request


def parse_embeddings(body: object) -> EmbedRequest:
    """Parse a body of /api/embeddings, which has one prompt."""
    fields = Fields(body)
    num_ctx = _num_ctx(fields)
    request = EmbedRequest(
        model=fields.require("model", STRING),
        prompts=[fields.require("prompt", STRING)],
        params=_embedding(truncate=True, dimensions=None),
        options=_of_context(num_ctx),
        num_ctx=num_ctx,
        keep_alive=_keep_alive(fields),
    )
    fields.end()
    return request


def parse_model(body: object) -> ModelRequest:
    """Parse a body that names a model, as ``model`` or, from older clients, as ``name``."""
    fields = Fields(body)
    names = {name: fields.take(name, STRING) for name in ("model", "name")}
    found = names["model"] or names["name"]
    if not found:
        raise RequestError(None, "model", None, "is missing", "Give the name of a model.")
    fields.take("verbose", BOOLEAN)  # the answer always has all facts
    request = ModelRequest(model=found, stream=fields.take("stream", BOOLEAN, True))
    fields.end({"insecure": (False,), "system": ("",), "template": ("",), "options": ({},)})
    return request


def _embedding(*, truncate: bool, dimensions: int | None) -> PoolingParams:
    return PoolingParams(task="embed", dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None)


def _params(fields: Fields, suggested: Suggested) -> tuple[SamplingParams, int | None]:
    """Return the parameters in ``options`` and ``format``, and ``num_ctx``."""
    options = fields.nested("options") or Fields({}, "options")
    found = {name: options.take(name, kind) for name, kind in SAMPLING.items() if name not in _OTHERWISE}
    stop = options.take("stop", either(STRING, STRINGS))
    penalty = options.take("repeat_penalty", SAMPLING["repetition_penalty"])
    if penalty is not None:
        if found["repetition_penalty"] is not None:
            raise RequestError(
                None, "options.repeat_penalty", penalty, "repetition_penalty is given too", "Give only one of them."
            )
        found["repetition_penalty"] = penalty
    given_values = {name: value for name, value in {**found, "stop": stop}.items() if value is not None}
    limit = limit_of(options, "num_predict", suggested.get("max_tokens"))
    num_ctx = _take_sizes(options)
    known = {name: value for name, value in suggested.items() if name != "max_tokens"}
    values = {**DEFAULTS, **known, **given_values}
    if (structured := _format(fields)) is not None:
        values["structured_outputs"] = structured
    names = {name: f"options.{name}" for name in given_values} | {
        "repetition_penalty": "options.repeat_penalty", "max_tokens": "options.num_predict",
    }  # fmt: skip
    params = params_of(names, **values, max_tokens=None if limit is not None and limit < 0 else limit)
    check_last_n(options, "repeat_last_n", params)
    options.end(_NEUTRAL_OPTIONS)
    return params, num_ctx


def _take_sizes(options: Fields) -> int | None:
    for name, kind in _OF_PROMPTS.items():
        options.take(name, kind)
    found: int | None = options.take("num_ctx", INTEGER)
    if found is not None and found < 1:
        raise RequestError(None, options.path("num_ctx"), found, "must be a number of tokens above 0", "Correct it.")
    return found


def _num_ctx(fields: Fields) -> int | None:
    """Return ``num_ctx`` of the options of an embedding. Other options cannot be applied."""
    options = fields.nested("options")
    if options is None:
        return None
    found = _take_sizes(options)
    options.end(_NEUTRAL_OPTIONS)
    return found


def _format(fields: Fields) -> object:
    """Return the structured outputs for ``format``, or None for free text."""
    asked = fields.take("format", _FORMAT, "")
    if asked == "":
        return None
    schema = {"type": "object"} if asked == "json" else asked
    if isinstance(schema, str):
        raise RequestError(None, "format", asked, "is not supported", 'Give "json" or a JSON schema.')
    return StructuredOutputs.of_schema(schema, Origin("format", schema))


def _thinking(fields: Fields) -> dict[str, Any]:
    """Return the options of a chat for ``think``."""
    asked = fields.take("think", _THINK)
    if isinstance(asked, str):
        return {"reasoning_effort": asked}
    return {} if asked is None else {"thinking": asked}


def keep_alive_of(body: Mapping[str, Any]) -> float | None:
    """Return the seconds for which the model of a body stays loaded. Raise RequestError for an invalid value."""
    return _keep_alive(Fields({name: value for name, value in body.items() if name == "keep_alive"}))


def _keep_alive(fields: Fields) -> float | None:
    """Return the seconds of a number, or of a duration such as "5m"; below 0: for ever."""
    value = fields.take("keep_alive", either(NUMBER, STRING))
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        return float(value)
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", value):
        return float(value)
    match = _DURATION.fullmatch(value)
    if match is None:
        reason = 'expected seconds, or a duration such as "5m" or "1h30m"'
        raise RequestError(None, "keep_alive", value, reason, "Correct it, or leave it out.")
    parts = re.findall(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)", match[2])
    return math.copysign(sum(float(count) * _UNITS[unit] for count, unit in parts), -1 if match[1] == "-" else 1)


def _data_url(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"


class _Messages:
    """The messages of a chat in OpenAI's form. origins: the paths of their parts in the body."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self._calls: list[tuple[str, str]] = []  # ids and names of calls without a result
        self._num_calls = 0

    def add(self, message: Fields) -> None:
        """Add a message. Raise RequestError if the value is not a message."""
        at = f"messages[{len(self.messages)}]"
        role = message.require("role", one_of("system", "user", "assistant", "tool"))
        content, images = message.take("content", STRING, ""), message.take("images", _IMAGES, [])
        found: dict[str, Any] = {"role": role, "content": content}
        if images:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images
            ]
            found["content"] = [*parts, {"type": "text", "text": content}] if content else parts
            self.origins |= {f"{at}.content[{i}]": f"{at}.images[{i}]" for i in range(len(images))}
        if role == "assistant":
            if thinking := message.take("thinking", STRING, ""):
                found["reasoning_content"] = thinking
            if calls := [self._call(call) for call in message.nested_list("tool_calls") or ()]:
                found["tool_calls"] = calls
        elif role == "tool":
            found |= self._result(message)
        message.end({"tool_name": ("",), "tool_calls": ([],), "thinking": ("",), "tool_call_id": ("",)})
        self.messages.append(found)

    def _call(self, call: Fields) -> dict[str, Any]:
        call_id = call.take("id", STRING) or f"call_{self._num_calls}"
        self._num_calls += 1
        call.take("type", one_of("function"))
        function = call.nested("function")
        if function is None:
            raise RequestError(None, call.path("function"), None, "is missing", 'Give {"name": …, "arguments": …}.')
        name, arguments = function.require("name", STRING), function.take("arguments", OBJECT, {})
        function.take("index", INTEGER)
        function.take("description", STRING)
        function.end()
        call.end()
        self._calls.append((call_id, name))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, message: Fields) -> dict[str, Any]:
        """Return the fields of a result. It belongs to the first call without a result, of this tool if a name is
        given.
        """
        name, call_id = message.take("tool_name", STRING), message.take("tool_call_id", STRING)
        for i, (known_id, known_name) in enumerate(self._calls):
            if (call_id in (None, known_id)) and (name in (None, known_name)):
                del self._calls[i]
                return {"tool_call_id": known_id, "name": known_name}
        return {"tool_call_id": call_id or "call_0", **({} if name is None else {"name": name})}
