"""Parse the body of an OpenAI request into a prompt and `SamplingParams`.

A body may have OpenAI's fields and, under their own names, the fields of `SamplingParams` (vLLM's extensions are among
them). A field that is null counts as absent. Each function raises a RequestError that names the field if a field is
unknown or not supported, or a value has another type. `SamplingParams.check` checks ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.batch.values.parameters import Parameter
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.engine import RequestOptions
from foreword.engine.chat import OF_TEMPLATES, ChatOptions
from foreword.engine.infill import make_infill
from foreword.engine.thinking import EFFORTS
from foreword.engine.validation import MAX_TEXTS
from foreword.errors import RequestError
from foreword.fields import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    Fields,
    Kind,
    either,
    list_of,
    one_of,
)
from foreword.models.tokenizer import Tokenizer
from foreword.openai import neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to be answered, such as the body of /v1/chat/completions.

    model: the name in the body, or None. messages: in the form that the chat template takes. chat: how the messages
    become a prompt, and how the answer is parsed. options: options of the request in the engine. stream: answer in
    chunks. include_usage: the chunks contain the usage. origins: fields that have other names in the body, see
    `RequestError.renamed`.
    """

    model: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams
    chat: ChatOptions = field(default_factory=ChatOptions)
    options: RequestOptions = field(default_factory=RequestOptions)
    stream: bool = False
    include_usage: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """The body of /v1/completions: one or more prompts, each a text or token ids. echo: texts begin with the prompt.
    suffix: the text after the completions, "" for none. The other fields are those of `ChatRequest`.
    """

    model: str | None
    prompts: list[str | list[int]]
    params: SamplingParams
    echo: bool = False
    suffix: str = ""
    options: RequestOptions = field(default_factory=RequestOptions)
    stream: bool = False
    include_usage: bool = False

    def filled(self, tokenizer: Tokenizer, max_model_len: int) -> CompletionRequest:
        """Return the request with prompts that contain the suffix, and parameters that end an output at the end of the
        gap. Raise RequestError as `make_infill` does, and for a prompt of token ids.
        """
        if not self.suffix:
            return self
        prompts: list[str | list[int]] = []
        params = self.params
        for i, prompt in enumerate(self.prompts):
            if not isinstance(prompt, str):
                raise RequestError(None, f"prompt[{i}]", prompt, "is token ids, but suffix is a text", "Give a text.")
            ids, params = make_infill(tokenizer, prompt, self.suffix, self.params, max_model_len)
            prompts.append(ids)
        return replace(self, prompts=prompts, params=params)


MAX_BIASES = 1 << 14  # most entries of logit_bias
MAX_IDS = 1 << 19  # token ids of a parameter: more than any vocabulary has

IDS = list_of(INTEGER, "a list of token ids")
MESSAGES = list_of(OBJECT, "a list of messages")
TOOLS = list_of(OBJECT, "a list of tools")


CHOICES = one_of("none", "auto", "required")
_TOKEN_ID = "^[0-9]{1,10}$"
_BIASES = Kind(
    "an object of numbers by token id",
    lambda value: (
        isinstance(value, dict) and all(re.match(_TOKEN_ID, key) and NUMBER.accepts(v) for key, v in value.items())
    ),
    {
        "type": "object",
        "propertyNames": {"pattern": _TOKEN_ID},
        "additionalProperties": NUMBER.schema,
        "maxProperties": MAX_BIASES,
    },
    MAX_BIASES,
)
EFFORT = one_of(*EFFORTS)
OF_TEMPLATE = {"template": "chat_template_kwargs"}
"""The name of the option of chats in bodies."""
_NO_LIMIT = -1
"""The value of max_tokens that stands for none."""
_FALSE = Kind("false", lambda value: value is False, {"const": False})
_COUNT = either(INTEGER, _FALSE)
_TEXT_OR_IDS = either(STRING, IDS)
_PROMPTS = Kind(
    "a string, token ids, or a list of these",
    lambda value: isinstance(value, str | list) and value != [],
    {"anyOf": [STRING.schema, {**list_of(either(_TEXT_OR_IDS, INTEGER), "").schema, "minItems": 1}]},
)

TEXTS = list_of(STRING, STRINGS.name, most=MAX_TEXTS)
_KIND_OF_TYPE = {
    "int": INTEGER,
    "float": NUMBER,
    "bool": BOOLEAN,
    "str | Sequence[str]": either(STRING, TEXTS),
    "str | int": either(STRING, INTEGER),
    "Sequence[str]": TEXTS,
    "Sequence[int]": list_of(INTEGER, IDS.name, most=MAX_IDS),
    "Sequence[Sequence[int]]": list_of(IDS, "a list of lists of token ids", most=MAX_TEXTS),
    "Mapping[str, object]": OBJECT,
}
"""Type of a parameter → the JSON values that it takes."""


def _described(row: Parameter) -> Kind:
    """Return the type of a parameter, whose schema has its meaning and its limits."""
    kind = _KIND_OF_TYPE[row.type]
    limits = {"minimum": row.least, "exclusiveMinimum": row.above, "maximum": row.most}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return kind._replace(schema={**kind.schema, **given, "description": row.help})


SAMPLING = {
    row.name: _described(row)
    for row in PARAMETERS
    if row.type in _KIND_OF_TYPE and row.name not in ("logprobs", "prompt_logprobs", "max_tokens", "detokenize")
}
"""The fields of a body that are fields of `SamplingParams` of the same name and meaning."""

Suggested = Mapping[str, Any]
"""Fields of `SamplingParams` for bodies that leave them open, in place of the defaults of their interface."""
NOTHING: Suggested = {}

LABELS = {"user": STRING, "metadata": OBJECT, "safety_identifier": STRING, "prompt_cache_key": STRING}
"""Fields that name the caller, and change no output."""


def parse_chat(body: object, suggested: Suggested = NOTHING) -> ChatRequest:
    """Parse a body of /v1/chat/completions. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    sampling = _sampling(fields, suggested)
    limits = {name: fields.take(name, INTEGER) for name in ("max_completion_tokens", "max_tokens")}
    found = set(limits.values()) - {None, _NO_LIMIT}
    if len(found) > 1:
        _fail("max_completion_tokens", limits["max_completion_tokens"], f"max_tokens is {limits['max_tokens']}", "one")
    wants_logprobs, alternatives = fields.take("logprobs", BOOLEAN, False), fields.take("top_logprobs", INTEGER, 0)
    if alternatives < 0 or (alternatives and not wants_logprobs):
        reason = "must be 0 or more" if alternatives < 0 else "needs logprobs: true"
        raise RequestError(None, "top_logprobs", alternatives, reason, "Correct it, or leave it out.")
    names = {"logprobs": "top_logprobs", **OF_TEMPLATE}
    if limits["max_completion_tokens"] is not None:
        names["max_tokens"] = "max_completion_tokens"
    request = ChatRequest(
        model=fields.take("model", STRING),
        messages=fields.require("messages", MESSAGES),
        params=params_of(
            names,
            **sampling,
            max_tokens=max(found) if found else None if _NO_LIMIT in limits.values() else suggested.get("max_tokens"),
            logprobs=alternatives if wants_logprobs else None,
        ),
        chat=_chat_options(fields),
        origins=names,
        **_common(fields),
    )
    fields.end(neutral.CHAT)
    return request


def parse_completion(body: object, suggested: Suggested = NOTHING) -> CompletionRequest:
    """Parse a body of /v1/completions. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    sampling = _sampling(fields, suggested)
    logprobs, echo = fields.take("logprobs", _COUNT), fields.take("echo", BOOLEAN, False)
    logprobs = None if logprobs is False else logprobs
    if logprobs is not None and logprobs < 0:
        raise RequestError(None, "logprobs", logprobs, "must be 0 or more", "Leave it out for none.")
    suffix = fields.take("suffix", STRING, "")
    if suffix and echo:
        raise RequestError(None, "echo", True, "is given with suffix", "Leave one of them out.")
    if echo and logprobs is not None:
        sampling.setdefault("prompt_logprobs", logprobs)
    request = CompletionRequest(
        model=fields.take("model", STRING),
        prompts=prompts_of(fields),
        params=SamplingParams(
            **sampling, max_tokens=limit_of(fields, "max_tokens", suggested.get("max_tokens", 16)), logprobs=logprobs
        ),
        echo=echo,
        suffix=suffix,
        **_common(fields),
    )
    fields.end(neutral.COMPLETION)
    return request


def params_of(names: Mapping[str, str], **values: Any) -> SamplingParams:
    """Return the sampling parameters of a body. names: the body's names of renamed fields, which errors use."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise error.renamed(names) from None


def sampling_fields(
    fields: Fields, suggested: Suggested = NOTHING, *, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields of a body that have the names of `SamplingParams` in every interface, with suggested values for
    those that are absent.
    """
    found = {name: fields.take(name, kind) for name, kind in SAMPLING.items() if name not in without}
    biases = fields.take("logit_bias", _BIASES)
    found["logit_bias"] = None if biases is None else {int(token): bias for token, bias in biases.items()}
    instead = {name: value for name, value in suggested.items() if name in found}
    return instead | {name: value for name, value in found.items() if value is not None}


def _sampling(fields: Fields, suggested: Suggested) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that both kinds of requests have."""
    found, structured = sampling_fields(fields, suggested), _structured_outputs(fields)
    return found if structured is None else {**found, "structured_outputs": structured}


def _structured_outputs(fields: Fields) -> object:
    """Return ``structured_outputs`` (vLLM's), or the equivalent of ``response_format`` (OpenAI's)."""
    direct = fields.take("structured_outputs", OBJECT)
    format = fields.take("response_format", OBJECT)
    found = None if format is None else _response_format(Fields(format, fields.path("response_format")))
    if found is not None and direct is not None:
        _fail("response_format", format, "structured_outputs is given too", "one")
    return direct if found is None else found


def _response_format(asked: Fields) -> object:
    kind = asked.require("type", one_of("text", "json_object", "json_schema", "structural_tag"))
    found: object = None
    if kind == "json_object":
        found = object_asked(asked)
    elif kind == "json_schema":
        described = asked.nested("json_schema") or Fields({}, asked.path("json_schema"))
        found = schema_asked(described)
        described.end()
    elif kind == "structural_tag":  # vLLM's
        tag = {"structures": asked.require("structures", OBJECTS), "triggers": asked.require("triggers", STRINGS)}
        made = StructuredOutputs.of({"structural_tag": tag}).with_structures(tag, "response_format")
        found = replace(made, origin=Origin("response_format", tag))
    asked.end()
    return found


def object_asked(asked: Fields) -> StructuredOutputs:
    """Return the structured outputs for {"type": "json_object"}; llama.cpp's form has a schema."""
    schema = asked.take("schema", OBJECT, {"type": "object"})
    return StructuredOutputs.of_schema(schema, Origin(asked.path("schema"), schema))


def schema_asked(described: Fields) -> StructuredOutputs:
    """Return the structured outputs for {name, description, schema, strict}. The schema is enforced for any value of
    ``strict``.
    """
    for name, label in {"name": STRING, "description": STRING, "strict": BOOLEAN}.items():
        described.take(name, label)
    schema = described.require("schema", OBJECT)
    return StructuredOutputs.of_schema(schema, Origin(described.path("schema"), schema))


def _common(fields: Fields) -> dict[str, Any]:
    """Return the fields that both kinds of requests have and that are not sampling parameters."""
    for name, kind in LABELS.items():
        fields.take(name, kind)
    stream, in_stream = fields.take("stream", BOOLEAN, False), fields.nested("stream_options")
    include_usage = False
    if in_stream is not None:
        include_usage = in_stream.take("include_usage", BOOLEAN, False)
        in_stream.end(neutral.STREAM_OPTIONS)
        if include_usage and not stream:
            raise RequestError(None, "stream_options", {"include_usage": True}, "needs stream: true", "Leave it out.")
    return {"options": request_options(fields), "stream": stream, "include_usage": include_usage}


def limit_of(fields: Fields, name: str, default: int | None = None) -> int | None:
    """Return a number of tokens, or None if there is no limit."""
    found: int | None = fields.take(name, INTEGER, default)
    return None if found == _NO_LIMIT else found


def request_options(fields: Fields) -> RequestOptions:
    """Return the fields of a body that are options of its request in the engine."""
    found = RequestOptions()
    if (priority := fields.take("priority", INTEGER)) is not None:
        found["priority"] = priority
    if (salt := fields.take("cache_salt", STRING)) is not None:
        found["cache_salt"] = salt
    return found


def template_variables(fields: Fields) -> dict[str, Any]:
    """Return ``chat_template_kwargs``: variables of the chat template, except those that other fields set."""
    wanted: dict[str, Any] = fields.take("chat_template_kwargs", OBJECT, {})
    for name in wanted.keys() & OF_TEMPLATES:
        raise RequestError(
            None, f"chat_template_kwargs.{name}", wanted[name], "is set by other fields", "Leave it out."
        )
    return wanted


def image_processing(fields: Fields) -> dict[str, Any] | None:
    """Return ``mm_processor_kwargs``: values of the model's processor of images; None if there are none."""
    return fields.take("mm_processor_kwargs", OBJECT) or None


def _chat_options(fields: Fields) -> ChatOptions:
    """Return the options of a chat: tools, and the variables of the chat template."""
    choice = fields.take("tool_choice", either(CHOICES, OBJECT), "auto")
    return ChatOptions(
        tools=tools_of(fields),
        chat_template=fields.take("chat_template", STRING),
        tool_choice=choice if isinstance(choice, str) else named_choice(Fields(choice, "tool_choice"), _named_function),
        parallel_tool_calls=fields.take("parallel_tool_calls", BOOLEAN, True),
        add_generation_prompt=fields.take("add_generation_prompt", BOOLEAN, True),
        template=template_variables(fields),
        reasoning_effort=fields.take("reasoning_effort", EFFORT),
        mm_processor_kwargs=image_processing(fields),
    )


def tools_of(fields: Fields) -> list[dict[str, Any]] | None:
    """Return ``tools`` without fields that are null or only labels."""
    tools = fields.take("tools", TOOLS)
    for i, tool in enumerate(tools or ()):
        _check_tool(Fields(tool, f"tools[{i}]"))
    return None if tools is None else [_without_labels(tool) for tool in tools]


def _check_tool(tool: Fields) -> None:
    kind = tool.take("type", STRING, "function")
    if kind != "function":
        raise tool.refuse("type", kind, "Describe a function of your own.")
    tool.take("cache_control", OBJECT)
    function = tool.nested("function") or tool
    function.require("name", STRING)
    for name, of_function in _FUNCTION.items():
        function.take(name, of_function)
    function.end()
    tool.end()


def _without_labels(tool: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in tool.items() if value is not None and name != "cache_control"}
    return {**found, "function": _without_labels(found["function"])} if "function" in found else found


_FUNCTION = {
    "description": STRING, "parameters": OBJECT, "strict": BOOLEAN, "return": OBJECT, "response": OBJECT,
}  # fmt: skip
"""Fields of a function. The last two, of what it returns, are in the descriptions that chat templates take."""


def named_choice(chosen: Fields, function: Callable[[Fields], str]) -> dict[str, Any]:
    """Return a choice of tools in the form of chats. function: reads the name from an object that names a function."""
    if chosen.require("type", one_of("function", "allowed_tools")) == "function":
        name = function(chosen)
        chosen.end()
        return {"type": "function", "function": {"name": name}}
    allowed = chosen.nested("allowed_tools") or chosen
    mode = allowed.require("mode", one_of("auto", "required"))
    tools = []
    for tool in allowed.nested_list("tools") or ():
        tool.require("type", one_of("function"))
        tools.append({"type": "function", "function": {"name": function(tool)}})
        tool.end()
    allowed.end()
    chosen.end()
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _named_function(chosen: Fields) -> str:
    function = chosen.nested("function")
    if function is None:
        raise RequestError(None, chosen.path("function"), None, "is missing", 'Give {"name": …}.')
    name: str = function.require("name", STRING)
    function.end()
    return name


def prompts_of(fields: Fields, name: str = "prompt") -> list[str | list[int]]:
    """Return the field as a list of texts or of lists of token ids."""
    prompt = fields.require(name, _PROMPTS)
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or IDS.accepts(prompt) else prompt
    for i, one in enumerate(prompts):
        if not _TEXT_OR_IDS.accepts(one):
            raise RequestError(None, f"{name}[{i}]", one, f"expected {_TEXT_OR_IDS.name}", "Correct it.")
    return prompts


def _fail(name: str, value: object, reason: str, what: str) -> NoReturn:
    raise RequestError(None, name, value, reason, f"Give only {what} of them.")
