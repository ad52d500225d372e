"""Grammars of calls: they allow what models write, and whatever they allow is read back as calls of the tools."""

import json
import re
from random import Random

import jsonschema
import numpy as np
import pytest

from foreword.errors import RequestError
from foreword.messages import FORMATS, Region, ResponseFormat, parse_message
from foreword.messages.calls import NamedCalls
from foreword.messages.grammar import call_grammar
from foreword.messages.markers import Literals
from foreword.messages.notation import PYTHON
from messages.rig import WRITERS, format_of

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f", 3, None]},
        "where": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "number"}}, "on": {"type": "boolean"}},
        },
        "other": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "more": {},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
CALLS = [
    ("weather", {"city": "Paris", "days": -3, "unit": "c", "where": {"at": [1, 2.5], "on": True}, "other": None}),
    ("stop", {}),
]
STOP = {"type": "function", "function": {"name": "stop"}}
PYTHONIC = ResponseFormat(
    name="pythonic",
    regions=(Region(kind="calls", unmarked="[", calls=NamedCalls(notation=PYTHON, opening="(", listed=True)),),
)


def format_for(writer):
    return PYTHONIC if writer == "pythonic" else format_of(writer)


def accepts(grammar, text):
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def drawn(grammar, random, longest=700, beginning=""):
    """A text that the grammar allows, byte by byte; None if it does not end soon."""
    matcher, text = llguidance.LLMatcher(TOKENIZER, grammar), bytearray(beginning.encode())
    assert matcher.try_consume_tokens(list(text)) == len(text)
    preferred = [ord(char) for char in "\"'}])>,:<|0"]
    while len(text) < longest:
        if matcher.is_accepting() and random.random() < 0.5:
            return text.decode()
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in mask[:256].nonzero()[0]]
        allowed = [token for token in allowed if token < 128] or allowed  # others are in marks
        if not allowed:
            return text.decode() if matcher.is_accepting() else None
        likely = [token for token in preferred if token in allowed]
        token = random.choice(likely if likely and random.random() < 0.6 else allowed)
        assert matcher.consume_token(token)
        text.append(token)
    return None


def test_calls_in_python_may_have_either_quotation_mark_and_words_of_json():
    """Templates of LFM2.5 write texts between double marks, and objects as JSON."""
    kinds = {"a": {"type": "string"}, "b": {"enum": ["it's", True]}, "c": {"type": "object"}, "d": {"type": "null"}}
    properties = {**kinds, "e": {"type": "object", "properties": {"k": {"type": "boolean"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    for mode in ("required", "auto"):
        grammar = call_grammar(format_of("lfm2"), tools, mode)
        for arguments in (
            """a="x'y", b="it's", c={"k": [true, null]}, d=null, e={"k": false}""",
            r"""a='x"y', b='it\'s', c={'k': [True, None]}, d=None, e={'k': False}""",
            "b=true",
        ):
            assert accepts(grammar, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>")
        assert not accepts(grammar, """<|tool_call_start|>[f(a="x')]<|tool_call_end|>""")


@pytest.mark.parametrize("writer", WRITERS)
def test_calls_as_models_write_them_are_allowed(writer):
    format, text = format_for(writer), WRITERS[writer](CALLS)
    assert accepts(call_grammar(format, TOOLS), text)
    assert accepts(call_grammar(format, TOOLS, "auto"), text)
    assert accepts(call_grammar(format, TOOLS, STOP), WRITERS[writer]([("stop", {})]))
    assert accepts(call_grammar(format, TOOLS, parallel=False), WRITERS[writer](CALLS[:1]))
    for grammar in (call_grammar(format, TOOLS, STOP), call_grammar(format, TOOLS, parallel=False)):
        assert not accepts(grammar, text)
    for wrong in ("", "Hello", WRITERS[writer]([("go", {})]), WRITERS[writer]([("weather", {"city": 3})])):
        assert not accepts(call_grammar(format, TOOLS), wrong)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("choice", ["required", STOP])
def test_what_is_allowed_is_read_as_calls_of_the_tools(writer, choice):
    format, num_read = format_for(writer), 0
    grammar = call_grammar(format, TOOLS, choice)
    for seed in range(25):
        text = drawn(grammar, Random(seed))
        if text is None:
            continue
        num_read += 1
        message = parse_message(text, format, tool_names=["weather", "stop"])
        assert message.tool_calls, text
        assert message.content == "", text
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            assert call.error is None
            assert call.name in (("weather", "stop") if choice == "required" else ("stop",))
            if call.name == "weather":
                assert isinstance(arguments["city"], str)
                assert arguments.keys() <= PARAMETERS["properties"].keys()
                assert isinstance(arguments.get("days", 0), int)
                assert arguments.get("unit", "c") in ("c", "f", 3, None)
    assert num_read > 2


def random_schema(random, depth=0):
    """A schema of a tool's parameters, or of a part of them."""
    if (depth and random.random() < 0.6) or depth > 2:
        return random.choice(
            [
                {"type": random.choice(["string", "integer", "number", "boolean", "null"])},
                {"enum": ["a b", 1, None, True, 'x"y']},
                {"type": "integer", "minimum": -3, "maximum": 12},
                {"type": "string", "maxLength": 4},
                {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            ]
        )
    names = random.sample(["a", "b c", "d-e", "f.g", "name", "arguments"], random.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth + 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["hermes", "smollm2", "llama3", "generic"])
@pytest.mark.parametrize("is_auto", [False, True])
def test_no_random_model_writes_a_malformed_call_of_a_random_tool(name, is_auto):
    format, num_calls = FORMATS[name], 0
    if is_auto and not format.marks_calls:
        return
    for seed in range(12):
        random = Random(seed)
        schemas = {f"tool.{i}": random_schema(random) for i in range(random.randint(1, 3))}
        tools = [
            {"type": "function", "function": {"name": tool, "parameters": schema, "strict": True}}
            for tool, schema in schemas.items()
        ]
        beginning = "Well. <tool_call>" if is_auto else ""
        text = drawn(call_grammar(format, tools, "auto" if is_auto else "required"), random, beginning=beginning)
        if text is None:
            continue
        message = parse_message(text, format, tool_names=schemas)
        assert message.tool_calls, text
        for call in message.tool_calls:
            num_calls += 1
            assert call.error is None, text
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert num_calls > 5


def test_text_around_calls_is_free_if_calls_are():
    grammar = call_grammar(FORMATS["hermes"], TOOLS, "auto")
    call = WRITERS["hermes"]([("stop", {})])
    for text in ("", "Hello <b>", f"<think>a</think>Let me see. {call} and {call}"):
        assert accepts(grammar, text)
    assert not accepts(grammar, "So <tool_call>\n{nothing")


def test_white_space_may_come_between_reasoning_and_a_demanded_call():
    call = WRITERS["hermes"]([("stop", {})])
    alone, after = (call_grammar(FORMATS["hermes"], TOOLS, after_reasoning=value) for value in (False, True))
    assert accepts(after, call)
    assert accepts(after, f"\n\n{call}")
    assert not accepts(alone, f"\n\n{call}")


def test_special_tokens_are_written_as_tokens():
    grammar = call_grammar(
        FORMATS["gemma4"], TOOLS, special_token_ids={"<|tool_call>": 48, '<|"|>': 52, "<tool_call|>": 49}
    )
    assert '<[48]> "call:"' in grammar
    assert "<[52]> STRING_TEXT0 <[52]>" in grammar
    assert '"<|tool_call>' not in grammar


@pytest.mark.parametrize("writer", ["phi4", "deepseek", "deepseek31", "kimi_k2"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_marks_of_calls_may_be_special_tokens(writer, choice):
    parts = re.split(r"(<[|｜][^<>]*[|｜]>)", WRITERS[writer](CALLS))
    ids = {mark: 240 + i for i, mark in enumerate(dict.fromkeys(parts[1::2]))}  # no text has these bytes
    matcher = llguidance.LLMatcher(TOKENIZER, call_grammar(format_of(writer), TOOLS, choice, special_token_ids=ids))
    tokens = [token for part in parts for token in ([ids[part]] if part in ids else part.encode())]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


def test_schemas_keep_their_own_references():
    item = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}
    grammar = call_grammar(FORMATS["hermes"], [{"name": "f", "parameters": item}, *TOOLS])
    assert accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>')


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, "always", "tool_choice.*none of the choices"),
        (TOOLS, {"function": {"name": "go"}}, "there is no tool 'go'"),
        ([], "required", "there are no tools"),
        ([{"function": {}}], "required", "no function with a name"),
        ([{"name": "f", "parameters": 3}], "required", "not a JSON schema"),
    ],
)
def test_a_wrong_choice_is_refused(tools, choice, message):
    with pytest.raises(RequestError, match=message):
        call_grammar(FORMATS["hermes"], tools, choice)


def test_a_format_without_a_grammar_is_refused():
    with pytest.raises(RequestError, match="no grammar"):
        call_grammar(FORMATS["plain"], TOOLS)
    with pytest.raises(RequestError, match="cannot write"):
        call_grammar(FORMATS["gemma4"], [{"name": "f", "parameters": {"type": "object", "properties": {"a b": {}}}}])


def test_a_marker_is_needed_for_calls():
    region = Region(kind="calls", open=Literals(["<c>"]), close=Literals(["</c>"]), calls=NamedCalls())
    grammar = call_grammar(ResponseFormat(name="own", regions=(region,)), TOOLS[1:])
    assert accepts(grammar, "<c>stop{}</c><c>stop{}</c>")


def strict(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True, **more}}


def test_an_unknown_format_of_a_parameter_is_an_annotation():
    tool = strict("f", {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}, "required": ["a"]})
    for choice in ("required", "auto"):
        grammar = call_grammar(FORMATS["hermes"], [tool], choice)
        assert accepts(grammar, WRITERS["hermes"]([("f", {"a": "/x"})]))
        assert not accepts(grammar, WRITERS["hermes"]([("f", {"a": 1})]))
    assert "format" in tool["function"]["parameters"]["properties"]["a"]


@pytest.mark.parametrize("writer", WRITERS)
def test_where_calls_are_free_only_strict_tools_follow_their_schemas(writer):
    tools = [strict("stop", {"type": "object", "properties": {}, "additionalProperties": False}), *TOOLS[:1]]
    grammar = call_grammar(format_for(writer), tools, "auto", parallel=False)
    loose, wrong = [("weather", {"other": [1, {"x": None}]})], [("stop", {"a": 1})]
    assert accepts(grammar, WRITERS[writer]([("stop", {})]))
    assert accepts(grammar, WRITERS[writer](loose))
    assert not accepts(grammar, WRITERS[writer](wrong))
    assert not accepts(grammar, WRITERS[writer]([("stop", {}), ("stop", {})]))
    assert accepts(grammar, "Hello.")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_tools(mode):
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [STOP]}}
    grammar = call_grammar(FORMATS["hermes"], TOOLS, chosen)
    assert accepts(grammar, WRITERS["hermes"]([("stop", {})]))
    assert not accepts(grammar, WRITERS["hermes"]([("weather", {"city": "Paris"})]))
    assert accepts(grammar, "Hello.") == (mode == "auto")
    with pytest.raises(RequestError, match="there is no tool 'go'"):
        call_grammar(FORMATS["hermes"], TOOLS, {**chosen, "allowed_tools": {"mode": mode, "tools": [{"name": "go"}]}})
    with pytest.raises(RequestError, match="names none"):
        call_grammar(FORMATS["hermes"], TOOLS, {**chosen, "allowed_tools": {"mode": mode, "tools": []}})


def test_a_strict_tool_is_refused_where_the_notation_cannot_follow_its_schema():
    tool = strict("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}})
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters = 'pattern': strict: true"):
        call_grammar(FORMATS["gemma4"], [tool], "auto")
    call_grammar(FORMATS["hermes"], [tool], "auto")


@pytest.mark.parametrize("name", ["hermes", "lfm2", "gemma4", "qwen3_coder"])
@pytest.mark.parametrize("key", ["required", "properties", "enum", "anyOf", "type"])
def test_a_keyword_of_a_wrong_type_is_refused(name, key):
    for parameters in ({key: 5}, {"properties": {"a": {"type": "object", "properties": {"b": {}}, key: 5}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(RequestError, match=rf"tools\[0\].function.parameters = 5: is not a value of {key}"):
            call_grammar(FORMATS[name], [tool])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {key: None}}}}}
    call_grammar(FORMATS[name], [tool])
