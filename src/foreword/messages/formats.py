"""Declarations of the formats in which models write messages, and the built-in formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from foreword.errors import ConfigError
from foreword.messages.calls import CallSink, CallsReader, JsonCalls, NamedCalls
from foreword.messages.generic import (
    CALL,
    CALL_END,
    Message,
    Told,
    deepseek31_messages,
    in_words,
    json_call,
    phi4_messages,
    python_call,
    with_written_calls,
)
from foreword.messages.markers import Literals, Marker
from foreword.messages.notation import PYTHON, Notation, Quotes
from foreword.messages.tagged_calls import TaggedCalls
from foreword.names import advice

WRITABLE = (JsonCalls, NamedCalls, TaggedCalls)
"""Notations of calls that a grammar can write."""


class Calls(Protocol):
    """The notation of a region's calls."""

    def reader(self, sink: CallSink, captures: Mapping[str, str]) -> CallsReader: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of an output.

    kind: the kind of its content; "discard": its text is dropped. open, close: the marks around it; without close it
    ends with the output, or where no call can follow. unmarked: characters; at the beginning of the output, each of
    them opens the region without a mark. strip: whitespace at its ends is dropped. join: the text between two regions
    of a kind. calls: the notation of its calls. padding: the text that a grammar writes between the marks and the
    calls. between: the text that it writes between two calls; None: each call has a region of its own, or is in a list.
    until: marks of other regions that end it, too, because models leave out its closing mark before them.
    """

    kind: Literal["content", "reasoning", "calls", "discard"]
    open: Marker | None = None
    close: Marker | None = None
    unmarked: str = ""
    strip: bool = True
    join: str = "\n"
    calls: Calls | None = None
    padding: str = ""
    between: str | None = None
    until: Literals | None = None


CONTENT = Region(kind="content")


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """The format in which a family of models writes a message.

    regions: its parts. outside: the text outside of them. anchor: the text that begins an answer in a prompt; text of
    the prompt after the last anchor is part of the answer. strip_ends: whitespace at the ends of the output is dropped.
    bare: the notation of calls that are the whole answer, without marks. signs: a chat template that contains all of
    these texts has this format. told: what makes the messages for a chat template that does not read tools; None: those
    of `with_generic_calls`. call_ids: the form of the ids of calls that the chat template writes, of {name} and
    {number}, which counts the calls of a conversation.
    """

    name: str
    regions: tuple[Region, ...]
    outside: Region = CONTENT
    anchor: Marker | None = None
    strip_ends: bool = False
    bare: JsonCalls | None = None
    signs: tuple[str, ...] = ()
    told: Told | None = None
    call_ids: str = ""

    @property
    def content(self) -> Region:
        """Return the region of the text outside of all regions."""
        return self.outside if self.outside.kind == "content" else CONTENT

    @cached_property
    def owners(self) -> Mapping[str, Region]:
        """Return the regions by the literal text of their opening mark; the outside region by its closing mark."""
        found = dict.fromkeys(_texts(self.outside.close), self.outside)
        return found | {text: region for region in self.regions for text in _texts(region.open)}

    @cached_property
    def openings(self) -> tuple[tuple[Marker, Region | None], ...]:
        """Return the marks that may end the outside text: all literal texts as one mark, and each pattern with its
        region.
        """
        marks = [(self.outside.close, self.outside), *((region.open, region) for region in self.regions)]
        patterns = [(mark, region) for mark, region in marks if mark is not None and not isinstance(mark, Literals)]
        return (*([(Literals(tuple(self.owners)), None)] if self.owners else []), *patterns)

    @cached_property
    def has_patterns(self) -> bool:
        """Return whether a mark is a regular expression."""
        marks = [mark for region in (self.outside, *self.regions) for mark in (region.open, region.close)]
        return any(mark is not None and not isinstance(mark, Literals) for mark in marks)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the literal texts of all marks."""
        regions = (self.outside, *self.regions)
        return tuple(text for region in regions for mark in (region.open, region.close) for text in _texts(mark))

    @cached_property
    def calls_region(self) -> Region | None:
        """Return the first region of calls, which a grammar writes, or None if the format has no calls."""
        return next((region for region in self.regions if region.calls is not None), None)

    @cached_property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """Return the texts that open and close the reasoning, or None if the format has no reasoning between literal
        texts.
        """
        for region in self.regions:
            if region.kind == "reasoning" and isinstance(region.open, Literals) and isinstance(region.close, Literals):
                return region.open.texts[0], region.close.texts[0]
        return None

    @cached_property
    def writes_calls(self) -> bool:
        """Return whether a grammar can write the calls, because their marks and notation are known."""
        region = self.calls_region
        is_marked = region is not None and (isinstance(region.open, Literals) or bool(region.unmarked))
        return region is not None and is_marked and isinstance(region.calls, WRITABLE)

    @property
    def marks_calls(self) -> bool:
        """Return whether a grammar can write the calls, each after a mark that no other text contains."""
        return self.writes_calls and self.calls_region is not None and self.calls_region.open is not None

    @cached_property
    def in_content(self) -> Callable[..., list[Message]] | None:
        """Return what makes the messages for a chat template that does not show calls, or None if no call can be
        written into a content. They are written in the notations of JSON and Python, between marks.
        """
        region = self.calls_region
        calls = region.calls if region is not None else None
        if region is None or not isinstance(region.open, Literals):
            return None
        if isinstance(calls, JsonCalls) and (calls.name, calls.arguments) == ("name", "arguments"):
            write = json_call
        elif isinstance(calls, NamedCalls) and calls.notation == PYTHON and calls.listed:
            write = python_call
        else:
            return None
        first, last = (mark.texts[0] if isinstance(mark, Literals) else "" for mark in (region.open, region.close))
        first, last = first + region.padding, region.padding + last

        def written(functions: Sequence[Mapping[str, Any]]) -> str:
            if calls.listed:
                return f"{first}[{', '.join(map(write, functions))}]{last}"
            return region.padding.join(f"{first}{write(function)}{last}" for function in functions)

        return lambda messages, *, takes_system: with_written_calls(messages, written, region.padding)

    @property
    def is_generic(self) -> bool:
        """Return whether its calls are those of `with_generic_calls`."""
        return self.calls_region is GENERIC_CALLS

    def with_generic_calls(self) -> ResponseFormat:
        """Return the format with the calls that `foreword.messages.generic` describes to a model, in place of its
        own.
        """
        regions = (*self.without_calls().regions, GENERIC_CALLS)
        return replace(self, regions=regions, bare=_BARE, told=in_words, call_ids="")

    def without_calls(self) -> ResponseFormat:
        """Return the format for answers without tools: text that looks like a call is content."""
        regions = tuple(region for region in self.with_whole_reasoning().regions if region.calls is None)
        return replace(self, regions=regions, bare=None)

    def with_whole_reasoning(self) -> ResponseFormat:
        """Return the format whose reasoning only its closing mark ends: text in it that looks like a call is
        reasoning.
        """
        regions = tuple(region if region.until is None else replace(region, until=None) for region in self.regions)
        return replace(self, regions=regions)


def _texts(marker: Marker | None) -> tuple[str, ...]:
    return marker.texts if isinstance(marker, Literals) else ()


def _between(kind: Literal["content", "reasoning", "calls"], start: str, end: str, **options: object) -> Region:
    return Region(kind=kind, open=Literals([start]), close=Literals([end]), **options)  # type: ignore[arg-type]


_HARMONY = "<|start|>assistant"


def _channel(*names: str) -> Literals:
    """Return the marks that open a message of these channels of harmony, at the beginning of an answer and later."""
    marks = [f"<|channel|>{name}<|message|>" for name in names]
    return Literals([*marks, *(_HARMONY + mark for mark in marks)])


def _thoughts(start: str, end: str, *calls: str) -> Region:
    """Return the region of reasoning, which these beginnings of calls end, too."""
    return _between("reasoning", start, end, until=Literals(calls))


_THINK = _between("reasoning", "<think>", "</think>")
_CHATML = Literals(["<|im_start|>assistant"])
_GEMMA_4 = Notation(names_as_keys=True, quotes={'"': Quotes('"'), '<|"|>': Quotes('<|"|>', "none")})
_GEMMA_3 = Notation(names_as_keys=True, quotes={'"': Quotes('"'), "<escape>": Quotes("<escape>", "none")})
_LLAMA = JsonCalls(arguments="parameters", separators=";")
_BARE = JsonCalls(unmarked=True, closed=True)
GENERIC_CALLS = _between("calls", CALL, CALL_END, calls=JsonCalls(), padding="\n")
_LLAMA_UNMARKED = JsonCalls(arguments="parameters", separators=";", unmarked=True)
_PYTHONIC = NamedCalls(notation=PYTHON, opening="(", listed=True, unmarked=True)
_MARKED_PYTHONIC = replace(_PYTHONIC, unmarked=False)
_FUNCTION_TAGS = TaggedCalls(
    name=("<function=", ">"), key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>", has_lines=True
)
_ARG_TAGS = TaggedCalls(
    name=("", ""), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), end="</tool_call>"
)
_DEEPSEEK = NamedCalls(
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", header="\n```json\n", end=("\n```", "<｜tool▁call▁end｜>")
)
_DEEPSEEK_ANSWERS = Literals(
    ["<｜Assistant｜>", "<｜Assistant｜></think>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"]
)
_INST = Literals(["[/INST]"])
_MISTRAL_THINKS = tuple(
    _thoughts(*marks, "[TOOL_CALLS]") for marks in (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
)

FORMATS = {
    format.name: format
    for format in (
        ResponseFormat(
            name="gemma4",
            anchor=Literals(["<|turn>model", "<tool_response|>"]),
            regions=(
                _thoughts("<|channel>thought", "<channel|>", "<|tool_call>call:"),
                _between("calls", "<|tool_call>call:", "<tool_call|>", calls=NamedCalls(notation=_GEMMA_4)),
            ),
            signs=("<|tool_call>",),
        ),
        ResponseFormat(
            name="harmony",
            anchor=Literals([_HARMONY]),
            regions=(
                Region(kind="reasoning", open=_channel("analysis"), close=Literals(["<|end|>"])),
                Region(
                    kind="calls",
                    open=Literals(
                        [
                            f"{_HARMONY}<|channel|>commentary to=functions.",
                            "<|channel|>commentary to=functions.",
                            f"{_HARMONY} to=functions.",
                        ]
                    ),
                    close=Literals(["<|call|>"]),
                    calls=NamedCalls(header=" <|constrain|>json<|message|>"),
                ),
                Region(kind="content", open=_channel("final", "commentary"), close=Literals(["<|end|>", "<|return|>"])),
            ),
            signs=("<|start|>assistant", "<|channel|>"),
        ),
        ResponseFormat(
            name="functiongemma",
            anchor=Literals(["<start_of_turn>model"]),
            regions=(
                _between(
                    "calls", "<start_function_call>call:", "<end_function_call>", calls=NamedCalls(notation=_GEMMA_3)
                ),
            ),
            signs=("<start_function_call>",),
        ),
        ResponseFormat(
            name="llama3",
            anchor=Literals(["<|start_header_id|>assistant<|end_header_id|>"]),
            regions=(
                Region(kind="calls", unmarked="{", calls=_LLAMA_UNMARKED),
                Region(kind="calls", unmarked="[", calls=_PYTHONIC),
                Region(kind="calls", open=Literals(["<|python_tag|>"]), calls=_LLAMA),
            ),
            bare=_BARE,
            signs=("<|start_header_id|>",),
        ),
        ResponseFormat(
            name="llama4",
            anchor=Literals(["<|header_start|>assistant<|header_end|>"]),
            regions=(
                Region(kind="calls", unmarked="{", calls=_LLAMA_UNMARKED),
                Region(kind="calls", unmarked="[", calls=_PYTHONIC),
                Region(kind="calls", open=Literals(["<|python_start|><|python_end|>"]), calls=_LLAMA),
                _between("calls", "<|python_start|>", "<|python_end|>", calls=_MARKED_PYTHONIC),
            ),
            bare=_BARE,
            signs=("<|header_start|>",),
        ),
        ResponseFormat(
            name="mistral3",
            anchor=_INST,
            regions=(
                *_MISTRAL_THINKS,
                Region(kind="calls", open=Literals(["[TOOL_CALLS]"]), calls=NamedCalls(header="[ARGS]")),
            ),
            signs=("[TOOL_CALLS]", "[ARGS]"),
        ),
        ResponseFormat(
            name="mistral",
            anchor=_INST,
            regions=(
                *_MISTRAL_THINKS,
                Region(kind="calls", open=Literals(["[TOOL_CALLS]"]), calls=JsonCalls(listed=True)),
            ),
            bare=_BARE,
            signs=("[TOOL_CALLS]",),
        ),
        ResponseFormat(
            name="granite3",
            anchor=Literals(["<|start_of_role|>assistant<|end_of_role|>"]),
            regions=(
                _THINK,
                _between("content", "<response>", "</response>"),
                Region(kind="calls", open=Literals(["<|tool_call|>"]), calls=JsonCalls(listed=True)),
            ),
            bare=_BARE,
            signs=("<|tool_call|>", "<|start_of_role|>"),
        ),
        ResponseFormat(
            name="command",
            anchor=Literals(["<|CHATBOT_TOKEN|>"]),
            regions=(
                _between("reasoning", "<|START_THINKING|>", "<|END_THINKING|>"),
                _between("content", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                _between("content", "<|START_TEXT|>", "<|END_TEXT|>"),
                _between(
                    "calls",
                    "<|START_ACTION|>",
                    "<|END_ACTION|>",
                    calls=JsonCalls(name="tool_name", arguments="parameters", number="tool_call_id", listed=True),
                ),
            ),
            bare=_BARE,
            signs=("<|START_ACTION|>",),
        ),
        ResponseFormat(
            name="apertus",
            anchor=Literals(["<|assistant_start|>"]),
            regions=(
                _thoughts("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>"),
                _between("calls", "<|tools_prefix|>", "<|tools_suffix|>", calls=JsonCalls(name="", listed=True)),
            ),
            bare=_BARE,
            signs=("<|tools_prefix|>",),
        ),
        ResponseFormat(
            name="phi4",
            anchor=Literals(["<|assistant|>"]),
            regions=(
                _THINK,
                _between("calls", "<|tool_call|>", "<|/tool_call|>", calls=JsonCalls(listed=True, separators=",")),
            ),
            bare=_BARE,
            signs=("<|tool|>", "<|/tool|>"),
            told=phi4_messages,
        ),
        ResponseFormat(
            name="nemotron2",
            anchor=Literals(["<SPECIAL_11>Assistant\n"]),
            regions=(_THINK, _between("calls", "<TOOLCALL>", "</TOOLCALL>", calls=JsonCalls(listed=True))),
            bare=_BARE,
            signs=("<TOOLCALL>", "<SPECIAL_11>"),
        ),
        ResponseFormat(
            name="olmo3",
            anchor=_CHATML,
            regions=(
                _THINK,
                _between(
                    "calls",
                    "<function_calls>",
                    "</function_calls>",
                    calls=NamedCalls(notation=PYTHON, opening="("),
                    between="\n",
                ),
            ),
            bare=_BARE,
            signs=("<function_calls>", "<|im_start|>"),
        ),
        ResponseFormat(
            name="deepseek",
            anchor=_DEEPSEEK_ANSWERS,
            regions=(
                _thoughts("<think>", "</think>", "<｜tool▁calls▁begin｜>"),
                _between("calls", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", calls=_DEEPSEEK, between="\n"),
                # R1's template leaves out the first mark after the first answer with calls.
                _between(
                    "calls",
                    _DEEPSEEK.begin,
                    "<｜tool▁calls▁end｜>",
                    calls=replace(_DEEPSEEK, begin="", end=(*_DEEPSEEK.end, _DEEPSEEK.begin)),
                ),
            ),
            bare=_BARE,
            signs=("<｜tool▁calls▁begin｜>", "```json"),
        ),
        ResponseFormat(
            name="deepseek31",
            anchor=_DEEPSEEK_ANSWERS,
            regions=(
                _thoughts("<think>", "</think>", "<｜tool▁calls▁begin｜>"),
                _between(
                    "calls",
                    "<｜tool▁calls▁begin｜>",
                    "<｜tool▁calls▁end｜>",
                    calls=NamedCalls(
                        begin="<｜tool▁call▁begin｜>", header="<｜tool▁sep｜>", end=("<｜tool▁call▁end｜>",)
                    ),
                    between="",
                ),
            ),
            bare=_BARE,
            signs=("<｜tool▁calls▁begin｜>",),
            told=deepseek31_messages,
        ),
        ResponseFormat(
            name="kimi_k2",
            anchor=Literals(["<|im_assistant|>assistant<|im_middle|>"]),
            regions=(
                _thoughts("<think>", "</think>", "<|tool_calls_section_begin|>"),
                _between(
                    "calls",
                    "<|tool_calls_section_begin|>",
                    "<|tool_calls_section_end|>",
                    calls=NamedCalls(
                        begin="<|tool_call_begin|>",
                        prefix="functions.",
                        number=":",
                        header="<|tool_call_argument_begin|>",
                        end=("<|tool_call_end|>",),
                    ),
                    between="",
                ),
            ),
            bare=_BARE,
            signs=("<|tool_calls_section_begin|>",),
            call_ids="functions.{name}:{number}",
        ),
        ResponseFormat(
            name="minimax_m1",
            anchor=Literals(["<beginning_of_sentence>ai name=MiniMax AI", "<beginning_of_sentence>ai name=assistant"]),
            regions=(
                _THINK,
                _between("calls", "<tool_calls>", "</tool_calls>", calls=JsonCalls(), padding="\n", between="\n"),
            ),
            bare=_BARE,
            signs=("<tool_calls>", "<beginning_of_sentence>"),
        ),
        ResponseFormat(
            name="minimax_m2",
            anchor=Literals(["]~b]ai"]),
            regions=(
                _thoughts("<think>", "</think>", "<minimax:tool_call>"),
                _between(
                    "calls",
                    "<minimax:tool_call>",
                    "</minimax:tool_call>",
                    calls=TaggedCalls(
                        name=('<invoke name="', '">'),
                        key=('<parameter name="', '">'),
                        value=("", "</parameter>"),
                        end="</invoke>",
                    ),
                    padding="\n",
                    between="\n",
                ),
            ),
            bare=_BARE,
            signs=("<minimax:tool_call>", "<invoke name="),
        ),
        ResponseFormat(
            name="minimax_m3",
            anchor=Literals(["]~b]ai"]),
            regions=(_between("reasoning", "<mm:think>", "</mm:think>"),),
            signs=("<mm:think>",),
        ),
        ResponseFormat(
            name="apriel",
            anchor=Literals(["<|assistant|>", "<|begin_assistant|>"]),
            regions=(
                _thoughts("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "<tool_calls>"),
                _between("calls", "<tool_calls>", "</tool_calls>", calls=JsonCalls(listed=True)),
            ),
            outside=Region(kind="content", close=Literals(["[END FINAL RESPONSE]"])),
            bare=_BARE,
            signs=("<tool_calls>[", "[BEGIN FINAL RESPONSE]"),
        ),
        ResponseFormat(
            name="hunyuan",
            anchor=Literals(["<|extra_0|>"]),
            regions=(
                replace(_THINK, close=Literals(["</think>", "</think>\n助手："])),
                _between("calls", "<tool_calls>", "</tool_calls>", calls=JsonCalls(listed=True)),
            ),
            outside=replace(CONTENT, close=Literals(["<answer>\n助手：", "<answer>", "</answer>"])),
            bare=_BARE,
            signs=("<tool_calls>[", "<|extra_0|>"),
        ),
        ResponseFormat(
            name="internlm2",
            anchor=_CHATML,
            regions=(
                Region(
                    kind="calls",
                    open=Literals(["<|action_start|><|plugin|>\n", "<|action_start|><|plugin|>"]),
                    close=Literals(["<|action_end|>"]),
                    calls=JsonCalls(),
                ),
            ),
            bare=_BARE,
            signs=("<|action_start|><|plugin|>",),
        ),
        ResponseFormat(
            name="gigachat31",
            anchor=Literals(["assistant<|role_sep|>"]),
            regions=(Region(kind="calls", open=Literals(["<|function_call|>"]), calls=JsonCalls()),),
            bare=_BARE,
            signs=("<|function_call|>", "<|role_sep|>"),
        ),
        ResponseFormat(
            name="smollm2",
            anchor=_CHATML,
            regions=(_THINK, _between("calls", "<tool_call>", "</tool_call>", calls=JsonCalls(listed=True))),
            bare=_BARE,
            signs=("<tool_call>[",),
        ),
        ResponseFormat(
            name="qwen3_coder",
            anchor=_CHATML,
            regions=(
                _thoughts("<think>", "</think>", "<tool_call>\n<function="),
                _between("calls", "<tool_call>", "</tool_call>", calls=_FUNCTION_TAGS, padding="\n"),
                # Qwen3-Coder sometimes leaves out the first mark.
                _between(
                    "calls", "<function=", "</tool_call>", calls=replace(_FUNCTION_TAGS, name=("", ">"), unmarked=True)
                ),
            ),
            bare=_BARE,
            signs=("<tool_call>", "<function="),
        ),
        ResponseFormat(
            name="minicpm5",
            anchor=_CHATML,
            regions=(
                _THINK,
                Region(
                    kind="calls",
                    open=Literals(['<function name="']),
                    calls=TaggedCalls(
                        name=("", '">'),
                        key=('<param name="', '">'),
                        value=("", "</param>"),
                        end="</function>",
                        quotes=("<![CDATA[", "]]>"),
                    ),
                ),
            ),
            bare=_BARE,
            signs=('<function name="', '<param name="'),
        ),
        ResponseFormat(
            name="glm45",
            anchor=Literals(["<|assistant|>"]),
            regions=(_THINK, Region(kind="calls", open=Literals(["<tool_call>"]), calls=_ARG_TAGS)),
            bare=_BARE,
            signs=("<arg_key>", "<arg_value>"),
        ),
        ResponseFormat(
            name="hy3",
            anchor=Literals(["<｜hy_Assistant:opensource｜>"]),
            regions=(
                _between("reasoning", "<think:opensource>", "</think:opensource>"),
                _between(
                    "calls",
                    "<tool_calls:opensource>",
                    "</tool_calls:opensource>",
                    calls=TaggedCalls(
                        name=("<tool_call:opensource>", "<tool_sep:opensource>"),
                        key=("<arg_key:opensource>", "</arg_key:opensource>"),
                        value=("<arg_value:opensource>", "</arg_value:opensource>"),
                        end="</tool_call:opensource>",
                    ),
                    padding="\n",
                    between="\n",
                ),
            ),
            bare=_BARE,
            signs=(":opensource", "<tool_sep{}>"),
        ),
        ResponseFormat(
            name="seed_oss",
            anchor=Literals(["<seed:bos>assistant"]),
            regions=(
                _between("reasoning", "<seed:think>", "</seed:think>"),
                _between(
                    "calls",
                    "<seed:tool_call>",
                    "</seed:tool_call>",
                    calls=replace(_FUNCTION_TAGS, has_lines=False),
                    padding="\n",
                ),
            ),
            bare=_BARE,
            signs=("<seed:tool_call>", "<function="),
        ),
        ResponseFormat(
            name="ernie45",
            anchor=_CHATML,
            regions=(_THINK, _between("calls", "<tool_call>", "</tool_call>", calls=JsonCalls(), padding="\n")),
            outside=replace(CONTENT, close=Literals(["<response>", "</response>"])),
            bare=_BARE,
            signs=("<global_setting>", "<response>"),
        ),
        ResponseFormat(
            name="hermes",
            anchor=_CHATML,
            regions=(
                _thoughts("<think>", "</think>", '<tool_call>\n{"name": '),
                _between("calls", "<tool_call>", "</tool_call>", calls=JsonCalls(), padding="\n"),
            ),
            bare=_BARE,
            signs=("<tool_call>",),
        ),
        ResponseFormat(
            name="minicpm3",
            anchor=_CHATML,
            regions=(
                _between("reasoning", "<|thought_start|>", "<|thought_end|>"),
                Region(
                    kind="calls",
                    open=Literals(["<|tool_call_start|>\n```python", "<|tool_call_start|>"]),
                    close=Literals(["```\n<|tool_call_end|>", "<|tool_call_end|>"]),
                    calls=NamedCalls(notation=PYTHON, opening="("),
                    padding="\n",
                    between="\n",
                ),
            ),
            bare=_BARE,
            signs=("<|tool_call_start|>", "<|thought_start|>"),
        ),
        ResponseFormat(
            name="lfm2",
            anchor=_CHATML,
            regions=(_THINK, _between("calls", "<|tool_call_start|>", "<|tool_call_end|>", calls=_MARKED_PYTHONIC)),
            signs=("List of tools: ", "<|im_start|>"),
        ),
        # The notations of calls of these formats are not known, so tools are in words.
        ResponseFormat(
            name="kimi_k3",
            anchor=Literals(['<|open|>message role="assistant"<|sep|>']),
            regions=(_between("reasoning", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
            outside=replace(
                CONTENT,
                close=Literals(["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"]),
            ),
            signs=("<|open|>", "<|end_of_msg|>"),
        ),
        ResponseFormat(
            name="solar_open",
            anchor=Literals(["<|begin|>assistant"]),
            regions=(
                Region(
                    kind="reasoning",
                    open=Literals(["<|think|>", "<|begin|>assistant<|think|>"]),
                    close=Literals(["<|end|>"]),
                ),
            ),
            outside=replace(CONTENT, close=Literals(["<|content|>", "<|begin|>assistant<|content|>", "<|end|>"])),
            signs=("<|think|>", "<|begin|>assistant"),
        ),
        ResponseFormat(name="think", anchor=_CHATML, regions=(_THINK,), signs=("<think>",)),
        ResponseFormat(name="plain", regions=()),
        ResponseFormat(name="generic", regions=(_THINK, GENERIC_CALLS), bare=_BARE, told=in_words),
    )
}
"""The built-in formats by name. "hermes" is also that of Qwen 2.5 and Qwen 3."""


def format_named(name: str) -> ResponseFormat:
    """Return a built-in format. Raise ConfigError for an unknown name, and for a value that is not a text."""
    if not isinstance(name, str):
        raise ConfigError(
            f"message_format={name!r:.80}: expected the name of a format. Use one of {', '.join(FORMATS)}."
        )
    if name not in FORMATS:
        fix = advice(name, FORMATS, f"Use one of {', '.join(FORMATS)}.")
        raise ConfigError(f"message_format={name!r}: unknown format. {fix}")
    return FORMATS[name]


def format_of_template(chat_template: str) -> ResponseFormat:
    """Return the built-in format of a chat template, by the marks that it contains, or "plain" if it has none."""
    found = (f for f in FORMATS.values() if f.signs and all(sign in chat_template for sign in f.signs))
    return next(found, FORMATS["plain"])
