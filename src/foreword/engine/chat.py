"""Conversations: their prompt, the parser of their answer, and a grammar if a call of a tool is required."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypedDict

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.engine.outputs import CompletionOutput, RequestOutput
from foreword.engine.prompt import MixedPrompt, Prompt
from foreword.engine.thinking import EFFORTS, USUAL_EFFORT, TemplateReads, merged
from foreword.errors import RequestError
from foreword.fields import check_json
from foreword.media.encoder import PROCESSING, TEXT_ONLY, Media, MediaEncoder, MediaPrompt, PlaceError
from foreword.media.images import Image
from foreword.media.parts import Medium, media_parts, refuse_places, take_media
from foreword.messages import MessageParser, ResponseFormat, format_named, format_of_template, parse_message
from foreword.messages.calls import JsonCalls
from foreword.messages.grammar import Tool, call_grammar, call_schema, chosen_tools, read_choice, read_tools
from foreword.messages.response_template import read_response_template
from foreword.models.chat_messages import WRITTEN_CALL, check_tools
from foreword.models.tokenizer import Tokenizer
from foreword.names import OTHERS, advice

REASONING_BUDGET = 8192
"""Largest number of reasoning tokens before a required call, unless the parameters have a thinking_budget."""

Message = Mapping[str, Any]
Conversation = str | Message | Sequence[Message]
"""A list of messages, one message, or the text of one message of the user."""
Tools = Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """The options for making a prompt of a conversation, and for reading its answer.

    tools: descriptions of tools, for the chat template (None); parameters are a JSON schema or a type that has one.
    tool_choice: "auto" (the default), "none": text that looks like a call is content, "required", {"type": "function",
    "function": {"name": …}}, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools":
    […]}}. parallel_tool_calls: whether the output may have several calls (True). A grammar constrains an output that
    must have calls, may have only one call or only calls of some tools, has tools with "strict": True, or marks its
    calls.
    message_format: a `ResponseFormat` or the name of a built-in one (None: the model's ``response_template``, or the
    format of its chat template). If it has no calls but there are tools, the calls of "generic" are used, and the
    prompt describes them in words.
    add_generation_prompt: the prompt ends with the beginning of an answer (True).
    template: further variables of the template, which must read them (None). reasoning_effort: one of `EFFORTS`;
    thinking: whether the model thinks before it answers (None: the default of its template), see `TemplateReads`.
    chat_template:
    the name of one of the model's templates (None: "tool_use" with tools if there is one, else "default").
    mm_processor_kwargs: values for the model's processor of images in place of those of its configuration, by their
    names in it, such as {"max_pixels": 500_000} or {"do_pan_and_scan": True} (None).
    """

    tools: Tools | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    message_format: str | ResponseFormat | None
    add_generation_prompt: bool
    template: Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking: bool | None
    chat_template: str | None
    mm_processor_kwargs: Mapping[str, Any] | None


OF_TEMPLATES = frozenset(("self", "messages", "tools", "add_generation_prompt", "media"))
"""Variables of chat templates that the options set, so they are not further variables."""


def chat_options(tokenizer: Tokenizer, given: Mapping[str, Any]) -> ChatOptions:
    """Return keyword arguments as options; any other name is a variable of the template. None counts as absent.

    Raise RequestError for a variable that the template does not read, for a field of `SamplingParams` (also under its
    name in other engines), and for a value of another type.
    """
    given = {name: value for name, value in given.items() if value is not None}
    parameters = {field.name for field in fields(SamplingParams)}
    for name in ("parallel_tool_calls", "add_generation_prompt", "thinking"):
        if not isinstance(value := given.get(name, True), bool):
            raise RequestError(None, name, value, "expected True or False", "Give one.")
    effort = given.get("reasoning_effort", USUAL_EFFORT)
    if not isinstance(effort, str) or effort not in EFFORTS:
        reason = f"must be one of {', '.join(map(repr, EFFORTS))}"
        raise RequestError(None, "reasoning_effort", effort, reason, "Give one of them, or template for another.")
    if not isinstance(value := given.get(PROCESSING, {}), Mapping):
        raise RequestError(None, PROCESSING, value, "is not a mapping", "Give the values of the processor by name.")
    variables = given.get("template", {})
    if not isinstance(variables, Mapping):
        raise RequestError(
            None, "template", variables, "is not a mapping", "Give the variables of the template by name."
        )
    check_json("template", variables)
    for name in OF_TEMPLATES & variables.keys():
        raise RequestError(None, f"template.{name}", variables[name], "is set by other options", "Leave it out.")
    for name, value in given.items():
        here = parameters.intersection((name, *OTHERS.get(name, ((), ""))[0]))
        if here and name not in ChatOptions.__annotations__:
            fix = f"Pass SamplingParams({min(here)}=…)."
            raise RequestError(None, name, value, "is not an option of a chat", fix)
    known = {name: value for name, value in given.items() if name in ChatOptions.__annotations__}
    others = {name: value for name, value in given.items() if name not in known}
    if others:
        chosen = {name: known[name] for name in ("chat_template",) if name in known}
        read = tokenizer.template_variables(tools=bool(known.get("tools")), **chosen)
        for name in others.keys() - (read - OF_TEMPLATES):
            fix = advice(name, {*ChatOptions.__annotations__, *read}, "Leave it out.")
            reason = "is not an option of a chat, and the chat template does not read it"
            raise RequestError(None, name, others[name], reason, fix)
    return ChatOptions(**{**known, "template": {**variables, **others}})  # type: ignore[typeddict-item]


def as_messages(conversation: Conversation) -> Sequence[Message]:
    """Return the messages without checking them."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return [conversation] if isinstance(conversation, Mapping) else conversation


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as text and tokens, its parameters, and the format of its answer.

    tool_schemas: the schemas of the tools' parameters, by the names of the tools. mixed: its prompt with vectors.
    """

    text: str
    token_ids: list[int]
    params: SamplingParams
    format: ResponseFormat
    tool_schemas: Mapping[str, Mapping[str, Any]]
    tokenizer: Tokenizer
    mixed: MixedPrompt | None = None

    @property
    def prompt(self) -> Prompt:
        """The prompt for the engine."""
        return self.token_ids if self.mixed is None else self.mixed

    def parser(self) -> MessageParser:
        """Return a parser of one answer."""
        schemas = self.tool_schemas
        return MessageParser(self.format, prompt=self.text, tool_names=schemas, tool_schemas=schemas)

    def reader(self) -> ChatReader:
        """Return a reader of the outputs of this conversation."""
        return ChatReader(self)


class ChatReader:
    """Adds events and counts of reasoning tokens to outputs, and messages to the final one.

    An output costs O(length of its new text).
    """

    __slots__ = ("_chat", "_readings")

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._readings: dict[int, _Reading] = {}

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the output with the events of its new text."""
        return replace(output, outputs=[self._read(completion, output.finished) for completion in output.outputs])

    def _read(self, completion: CompletionOutput, is_final: bool) -> CompletionOutput:
        reading = self._readings.get(completion.index)
        if reading is None:
            reading = self._readings[completion.index] = _Reading(self._chat)
        return reading.read(completion, is_final)


class _Reading:
    """The state of one completion: its parser, the length of its text, and the number of tokens and characters up to
    the end of its reasoning (or of its text, if the reasoning has not ended).
    """

    __slots__ = ("_detokenizer", "_num_chars", "_num_text", "_num_tokens", "_parser")

    def __init__(self, chat: Chat) -> None:
        self._parser = chat.parser()
        self._detokenizer = chat.tokenizer.detokenizer(
            chat.params.skip_special_tokens,
            continues=True,
            spaces_between_special_tokens=chat.params.spaces_between_special_tokens,
        )
        self._num_text = self._num_chars = self._num_tokens = 0

    def read(self, completion: CompletionOutput, is_final: bool) -> CompletionOutput:
        events, message = self._parser.push(completion.new_text), None
        num_reasoning = self._count_reasoning(completion)
        if is_final:
            events += self._parser.finish()
            message = self._parser.message
        return replace(completion, events=tuple(events), message=message, reasoning_tokens=num_reasoning)

    def _count_reasoning(self, completion: CompletionOutput) -> int | None:
        self._num_text += len(completion.new_text)
        end, is_open = self._parser.reasoning_end, self._parser.in_reasoning
        if end is None and not is_open:
            return None
        token_ids = completion.transcript.token_ids
        while self._num_chars < (self._num_text if end is None else end) and self._num_tokens < completion.num_tokens:
            self._num_chars += len(self._detokenizer.push((token_ids[self._num_tokens],)))
            self._num_tokens += 1
        return completion.num_tokens if end is None else self._num_tokens


def make_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    params: SamplingParams,
    max_tokens: int,
    options: ChatOptions,
    media: Media = TEXT_ONLY,
    follows_grammars: bool = True,
) -> Chat:
    """Return a conversation with the prompt of the chat template and encoded images and sounds. max_tokens: longer
    prompts are refused.

    follows_grammars: whether the model's executor supports grammars; if not, calls that need no grammar have none.
    Raise RequestError for wrong messages or options; ModelError for an invalid template of the model.
    """
    written = _written(tokenizer, messages, params, max_tokens, options, media, follows_grammars)
    chat, encoder = written.chat, media.encoder
    if encoder is None or not written.media:
        return replace(chat, token_ids=written.encode(chat.text))
    with written.places(encoder):
        prompt = encoder.prompt(chat.text, written.media, written.encode)
    return replace(chat, token_ids=prompt.token_ids, mixed=_mixed(prompt))


def num_chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    params: SamplingParams,
    max_tokens: int,
    options: ChatOptions,
    media: Media = TEXT_ONLY,
) -> int:
    """Return the number of tokens of the prompt that `make_chat` makes, without encoding images and sounds. Errors are
    those of `make_chat`.
    """
    written = _written(tokenizer, messages, params, max_tokens, options, media, True)
    text, encoder = written.chat.text, media.encoder
    if encoder is not None and written.media:
        with written.places(encoder):
            text = encoder.expanded(text, written.media)
    return len(written.encode(text))


class _Written(NamedTuple):
    """A conversation without the tokens of its prompt, its images and sounds, and how its text is tokenized."""

    chat: Chat
    messages: Sequence[Message]
    media: list[Medium]
    encode: Callable[[str], list[int]]

    @contextmanager
    def places(self, encoder: MediaEncoder) -> Iterator[None]:
        """Raise RequestError in place of PlaceError for a message whose text has a placeholder, if one has."""
        try:
            yield
        except PlaceError:
            refuse_places(self.messages, encoder.placeholders)
            raise


def _written(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    params: SamplingParams,
    max_tokens: int,
    options: ChatOptions,
    media: Media,
    follows_grammars: bool,
) -> _Written:
    """Return a conversation as the chat template writes it. Raise ContextLengthError for images and sounds that become
    more vectors than max_tokens; other errors are those of `make_chat`.
    """
    messages, found = _media(messages, media, options.get("mm_processor_kwargs") or {})
    described = check_tools(options.get("tools"))
    tools, choice = read_tools(described or ()), options.get("tool_choice", "auto")
    check_json("tool_choice", choice)
    mode = read_choice(choice).mode
    schemas = {tool.name: tool.parameters for tool in tools}
    name = options.get("chat_template")
    chosen = {} if name is None else {"chat_template": name}
    source = tokenizer.chat_template(tools=bool(tools), **chosen)
    given = options.get("message_format")
    format = given if isinstance(given, ResponseFormat) else _format(tokenizer, source, given)
    shows_tools = "tools" in tokenizer.template_variables(tools=bool(tools), **chosen)
    shown = [_without_strict(tool) for tool in described or ()]
    call = tokenizer.written_call(tools=bool(tools), **chosen)
    if given is None:
        is_own = tokenizer.response_template is not None or not (tools and call) or _reads(format.name, call)
        if (tools and not (format.calls_region and is_own)) or not (shows_tools or format.told):
            format = format.with_generic_calls()
    told = format.told if format.is_generic or not shows_tools else None
    convert = partial(told, tools=shown) if told else format.in_content if call == "" else None
    variables = _variables(tokenizer, source, format, options)
    text = tokenizer.apply_chat_template(
        messages,
        tools=[] if told else shown,
        in_words=convert,
        call_ids=format.call_ids,
        **chosen,
        add_generation_prompt=options.get("add_generation_prompt", True),
        media=media.encoder.placeholders if media.encoder is not None else (),
        **variables,
    )
    asked = _asks_for_grammar(format, tools, choice, options.get("parallel_tool_calls", True))
    if asked is not None and asked.field == "tools" and not follows_grammars:
        asked = None
    if mode == "required" or (asked is not None and params.structured_outputs is None):
        params = _constrained(tokenizer, params, format, described or (), options, asked, text)
        if asked is None or asked.field != "tools":
            # The grammar only has calls with marks, and begins after the mark that closes the reasoning.
            format = replace(format.with_whole_reasoning(), bare=None)
    elif params.structured_outputs is not None:
        params, format = _after_opened_reasoning(params, format, text), format.with_whole_reasoning()
    if not tools or mode == "none":
        format = format.without_calls()
    if any(token in mark for mark in format.marks for token in tokenizer.special_token_ids):
        params = replace(params, skip_special_tokens=False)  # otherwise the marks would not be in the text
    # The template writes the special tokens.
    limit = None if params.truncate_prompt_tokens else max_tokens
    encode = partial(tokenizer.encode, add_special_tokens=False, max_tokens=limit)
    if found and media.encoder is not None:
        media.encoder.check_length(found, max_tokens)
    return _Written(Chat(text, [], params, format, schemas, tokenizer), messages, found, encode)


def _variables(tokenizer: Tokenizer, source: str, format: ResponseFormat, options: ChatOptions) -> dict[str, Any]:
    """Return the further variables of the template that the options ask for. Raise RequestError if it does not read
    one.
    """
    given, effort, thinking = options.get("template") or {}, options.get("reasoning_effort"), options.get("thinking")
    if not given and effort is None and thinking is None:
        return {}
    marks, name = format.reasoning_marks or (), options.get("chat_template")
    read = tokenizer.template_variables(
        tools=bool(options.get("tools")), **({} if name is None else {"chat_template": name})
    )
    reads = TemplateReads(read, any(mark in source for mark in marks))
    reads.check(given)
    return merged(given, reads.asked(effort, thinking))


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a tool for the chat template, without ``strict``, which only the grammar reads."""
    found = {name: value for name, value in tool.items() if name != "strict"}
    function = found.get("function")
    return {**found, "function": _without_strict(function)} if isinstance(function, Mapping) else found


def _media(
    messages: Sequence[Message], media: Media, processing: Mapping[str, Any]
) -> tuple[Sequence[Message], list[Medium]]:
    """Return the messages with placeholders for images and sounds, and the images and sounds. Raise RequestError for
    those, and for values of the processor of images, that the model does not support.
    """
    for field, kind, part in media_parts(messages):
        if kind in media.refused:
            reason = f"the model takes no {kind}: {media.refused[kind]}"
            raise RequestError(None, field, part["type"], reason, "Leave it out, or use another model.")
    if media.encoder is None:
        if processing:
            raise RequestError(None, PROCESSING, processing, "the model takes no images", "Leave it out.")
        return messages, []
    media.encoder.check_processing(processing)
    messages, found = take_media(messages, media.limits)
    return messages, [replace(one, processing=processing) if isinstance(one, Image) else one for one in found]


def _mixed(prompt: MediaPrompt) -> MixedPrompt:
    mixed = MixedPrompt(
        prompt_embeds=prompt.embeds, prompt_token_ids=prompt.token_ids, prompt_is_token_ids=prompt.is_token
    )
    if prompt.positions is not None:
        mixed["mrope_positions"], mixed["mrope_delta"] = prompt.positions, prompt.mrope_delta
    return mixed


def _format(tokenizer: Tokenizer, chat_template: str, name: str | None) -> ResponseFormat:
    if name is not None:
        return format_named(name)
    if tokenizer.response_template is not None:
        return read_response_template(tokenizer.response_template)
    return format_of_template(chat_template)


@lru_cache(maxsize=16)
def _reads(format_name: str, text: str) -> bool:
    """Return whether a built-in format reads the call that a chat template writes: `WRITTEN_CALL`."""
    format = format_named(format_name)
    anchor = format.anchor.find(text, 0, at_end=True)[0] if format.anchor is not None else None
    # The text before the answer may be part of a mark.
    parts = (text, text[anchor.end :]) if anchor is not None else (text,)
    name, arguments = WRITTEN_CALL
    calls = (call for part in parts for call in parse_message(part, format, tool_names=[name]).tool_calls)
    wanted = _as_texts(json.dumps(arguments))
    return any(call.error is None and call.name == name and _as_texts(call.arguments) == wanted for call in calls)


def _as_texts(arguments: str) -> dict[str, str] | None:
    """Return the arguments with values as texts, as some templates write all values; None if they are nested deeply."""
    try:
        return {key: str(value) for key, value in json.loads(arguments).items()}
    except RecursionError:
        return None


def _after_opened_reasoning(params: SamplingParams, format: ResponseFormat, prompt: str) -> SamplingParams:
    """Return the parameters. If the prompt has opened the reasoning and they do not name its end, their structure
    begins after the reasoning.
    """
    marks = format.reasoning_marks
    if params.thinking_end is None and marks is not None and MessageParser(format, prompt=prompt).in_reasoning:
        return replace(params, thinking_end=marks[1])
    return params


def _asks_for_grammar(
    format: ResponseFormat, tools: Sequence[Tool], choice: str | Mapping[str, Any], parallel: bool
) -> Origin | None:
    """Return the option because of which an output with calls needs a grammar; None if there is none."""
    mode, names = read_choice(choice)
    if mode == "required" or (mode == "auto" and names is not None):
        return Origin("tool_choice", choice)
    if mode == "none" or not tools or format.calls_region is None:
        return None
    if not parallel:
        return Origin("parallel_tool_calls", parallel)
    strict = next((Origin(f"{tool.at}.strict", True) for tool in tools if tool.is_strict), None)
    if strict is None and format.marks_calls and find_spec("llguidance") is not None:
        return Origin("tools", [tool.name for tool in tools])  # so that no call has a wrong form
    return strict


def _constrained(
    tokenizer: Tokenizer,
    params: SamplingParams,
    format: ResponseFormat,
    tools: Tools,
    options: ChatOptions,
    asked: Origin | None,
    prompt: str,
) -> SamplingParams:
    """Return the parameters with a grammar of the calls that the options require or allow. It begins after the
    reasoning, if the prompt has opened one or the output may begin with one. asked: the option that needs the grammar;
    errors name it.
    """
    choice, parallel = options.get("tool_choice", "auto"), options.get("parallel_tool_calls", True)
    is_demanded = read_choice(choice).mode == "required"
    if params.structured_outputs is not None:
        reason = "the output cannot follow two grammars"
        raise RequestError(None, "tool_choice", choice, reason, "Leave out structured_outputs or tool_choice.")
    if params.thinking_end is None and (marks := format.reasoning_marks) is not None:
        params = _after_opened_reasoning(params, format, prompt)
        if params.thinking_end is None and len(opening := tokenizer.encode(marks[0], add_special_tokens=False)) == 1:
            params = replace(params, thinking_start=opening[0], thinking_end=marks[1])
        if is_demanded and params.thinking_end is not None and params.thinking_budget is None:
            params = replace(params, thinking_budget=REASONING_BUDGET)
    try:
        grammar = call_grammar(
            format,
            tools,
            choice,
            parallel=parallel,
            special_token_ids=tokenizer.special_token_ids,
            after_reasoning=params.thinking_end is not None,
        )
    except RequestError as error:
        if is_demanded or error.field != "tool_choice" or asked is None:
            raise
        fix = "Leave it out, or use another message_format."
        raise RequestError(None, *asked, error.reason, fix) from None
    return replace(
        params,
        structured_outputs=StructuredOutputs(
            kind="grammar", text=grammar, origin=asked, parts=_parts(format, read_tools(tools), choice, is_demanded)
        ),
    )


def _parts(
    format: ResponseFormat, tools: Sequence[Tool], choice: str | Mapping[str, Any], is_demanded: bool
) -> tuple[StructuredOutputs, ...]:
    """Return the schemas for a grammar of calls, by their tools."""
    if format.calls_region is None or not isinstance(format.calls_region.calls, JsonCalls):
        return ()
    return tuple(
        StructuredOutputs.of_schema(call_schema(tool), Origin(f"{tool.at}.parameters", tool.parameters))
        for tool in chosen_tools(tools, choice)
        if is_demanded or tool.is_strict
    )
