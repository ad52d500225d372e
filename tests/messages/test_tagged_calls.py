"""Calls between tags: read in pieces, with the types of the tools' schemas, and written by grammars."""

import json
from random import Random

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import RequestError
from foreword.messages import FORMATS, MessageParser, format_of_template, parse_message
from foreword.messages.grammar import call_grammar
from foreword.messages.message import ArgumentsDelta, CallStart
from foreword.messages.tagged_calls import value_as_json
from foreword.schemas import types_of
from messages.rig import CUTS, PROSE, TEXTS, in_pieces

EVERY = range(2000)


def written(value, as_json=True):
    if isinstance(value, str):
        return value
    return json.dumps(value) if as_json or isinstance(value, dict | list) else str(value)


def qwen3_coder(calls):
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{written(v, as_json=False)}\n</parameter>\n" for key, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def seed_oss(calls):
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{written(v, as_json=False)}</parameter>\n" for key, v in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def glm45(calls, between="\n"):
    return "\n".join(
        f"<tool_call>{name}{between}"
        + "".join(
            f"<arg_key>{key}</arg_key>{between}<arg_value>{written(value)}</arg_value>{between}"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def glm47(calls):
    return glm45(calls, between="")


def minimax_m2(calls):
    texts = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{written(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return "\n".join(["<minimax:tool_call>", *texts, "</minimax:tool_call>"])


def minicpm5(calls):
    def quoted(value):
        is_quoted = isinstance(value, str) and any(char in value for char in "<&\n")
        return f"<![CDATA[{value}]]>" if is_quoted else written(value, as_json=False)

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{quoted(value)}</param>' for key, value in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def hy3(calls):
    def argument(key, value):
        return f"<arg_key:{of}>{key}</arg_key:{of}>\n<arg_value:{of}>{written(value)}</arg_value:{of}>\n"

    of = "opensource"
    texts = (
        f"<tool_call:{of}>{name}<tool_sep:{of}>\n"
        + "".join(argument(*item) for item in arguments.items())
        + f"</tool_call:{of}>"
        for name, arguments in calls
    )
    return "\n".join([f"<tool_calls:{of}>", *texts, f"</tool_calls:{of}>"])


WRITERS = {
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
    "glm45": glm45,
    "glm47": glm47,
    "minimax_m2": minimax_m2,
    "minicpm5": minicpm5,
    "hy3": hy3,
}
EACH = pytest.mark.parametrize("writer", WRITERS)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "is on": {"type": "boolean"},
        "none": {"type": "null"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/number"}},
        "unit": {"enum": ["c", "f", 3, None]},
        "color": {"$ref": "#/$defs/color"},
        "other": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "object": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "number"}, "color": {"type": "string", "enum": ["1", "true"]}},
}
SCHEMAS = {"f": SCHEMA, "stop": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
INTEGERS = st.integers(-(10**20), 10**20)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS},
    optional={
        "count": INTEGERS,
        "ratio": st.floats(-10, 10) | INTEGERS,
        "is on": st.booleans(),
        "none": st.none(),
        "list": st.lists(INTEGERS, max_size=2),
        "unit": st.sampled_from(["c", "f", 3, None]),
        "color": st.sampled_from(["1", "true"]),
        "other": TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
        "object": st.dictionaries(TEXTS, TEXTS, max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.just("f"), ARGUMENTS) | st.just(("stop", {})), min_size=1, max_size=3)


def format_of(writer):
    return FORMATS["glm45" if writer == "glm47" else writer]


def read(text, writer, cuts=EVERY):
    return in_pieces(text, cuts, format_of(writer), tool_names=SCHEMAS, tool_schemas=SCHEMAS)


def calls_of(message):
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@EACH
@given(calls=CALLS, cuts=CUTS, before=PROSE, after=PROSE)
def test_written_calls_come_back(writer, calls, cuts, before, after):
    message = read(f"{before}\n{WRITERS[writer](calls)}\n{after}", writer, cuts)
    assert calls_of(message) == calls
    assert message.content == "\n".join(filter(None, (before, after)))
    assert all(call.error is None for call in message.tool_calls)


@EACH
@given(call=st.tuples(st.just("f"), ARGUMENTS), cuts=CUTS, end=st.integers(1, 300))
def test_a_cut_call_is_incomplete_or_content(writer, call, cuts, end):
    whole = WRITERS[writer]([call])
    text = whole[: end % len(whole)]
    message = read(text, writer, cuts)
    assert message == parse_message(text, format_of(writer), tool_names=SCHEMAS, tool_schemas=SCHEMAS, call_id="c")
    if message.tool_calls:
        assert message.content == ""
        (found,) = message.tool_calls
        assert found.name == "f"
        assert found.error in (None, "incomplete")
        if found.error is None:
            assert json.loads(found.arguments) == call[1]
    else:
        assert text.startswith(message.content)


PARTS = (
    "<tool_call>", "</tool_call>", "<function=", "<parameter=", ">", "</parameter>", "</function>", "f", "text", "stop",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</arg", "<func", "1", "<seed:tool_call>", "\n", " ",
    "</seed:tool_call>", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">',
    '<parameter name="', "</invoke>", '<function name="', '<param name="', "</param>", "<![CDATA[", "]]>", "<!",
    "<tool_calls:opensource>", "<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>",
)  # fmt: skip


@EACH
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14).map("".join), cuts=CUTS)
def test_any_cutting_of_any_text_gives_the_same_message(writer, parts, cuts):
    expected = read(parts, writer, ())
    assert read(parts, writer, cuts) == expected
    assert read(parts, writer) == expected


@EACH
def test_a_string_is_sent_while_it_is_read(writer):
    parser = MessageParser(format_of(writer), tool_names=SCHEMAS, tool_schemas=SCHEMAS)
    text = WRITERS[writer]([("f", {"text": "one two three", "count": 3})])
    events = parser.push(text[: text.index("three")])
    assert any(isinstance(event, CallStart) for event in events)
    sent = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert sent.startswith('{"text": "one two')


def test_a_tag_that_models_leave_out_is_not_needed():
    message = read("Well.\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>", "qwen3_coder")
    assert (message.content, calls_of(message)) == ("Well.", [("f", {"text": "a"})])


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2"])
def test_a_call_ends_reasoning_whose_closing_mark_is_left_out(name):
    message = read(f"<think>Hm, <tool_call>?\n{WRITERS[name]([('stop', {})])}", name)
    assert (message.reasoning.strip(), message.content) == ("Hm, <tool_call>?", "")
    assert [call.name for call in message.tool_calls] == ["stop"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nf(1)\n</tool_call>",
        "<tool_call>\n<func",
        "<tool_call>\n<function=>x",
        "Write `<function=name>` first",
    ],
)
def test_what_is_no_call_is_content(text):
    assert read(text, "qwen3_coder").content == text


def test_a_call_follows_one_without_its_outer_tags():
    message = read(
        "<function=stop>\n</function>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>", "qwen3_coder"
    )
    assert (message.content, calls_of(message)) == ("", [("stop", {})] * 2)


@pytest.mark.parametrize("name", ["server/f", "server:f", "f.g-h", "für"])
@EACH
def test_a_name_may_have_any_characters_but_spaces_quotes_and_brackets(writer, name):
    text = WRITERS[writer]([(name, {})])
    assert calls_of(read(text, writer)) == [(name, {})]
    assert grammars.accepts(call_grammar(format_of(writer), [{"name": name}]), text)
    with pytest.raises(RequestError, match=r"tools\[0\].name.*cannot write"):
        call_grammar(format_of(writer), [{"name": f"{name} f"}])


def test_damage_after_the_name_is_part_of_the_arguments():
    message = read("<tool_call><function=f><parameter=text>a</parameter></tool_call> Well.", "qwen3_coder")
    (call,) = message.tool_calls
    assert (call.arguments, call.error, message.content) == ('{"text": "a"', "malformed", "Well.")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5", {"string", "integer"}, 5),
        ("5", None, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5.0", {"integer"}, 5.0),
        ("1e3", {"number"}, 1000.0),
        ("True", {"boolean"}, True),
        ("true", {"boolean", "null"}, True),
        ("None", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("{'a': [1, None]}", {"object"}, {"a": [1, None]}),
        ('{"a": "b"}', {"string"}, '{"a": "b"}'),
        ("[1, 2", {"array"}, "[1, 2"),
        ('"a"', None, '"a"'),
        ("", None, ""),
        ("a 5", None, "a 5"),
    ],
)
def test_the_type_of_a_value_is_one_that_its_schema_allows(text, types, value):
    found = json.loads(value_as_json(text, None if types is None else frozenset(types)))
    assert (found, type(found)) == (value, type(value))


def test_types_of_schemas():
    assert types_of(SCHEMA["properties"]["color"], SCHEMA) == {"string"}
    assert types_of(SCHEMA["properties"]["unit"], SCHEMA) == {"string", "integer", "null"}
    assert types_of({"oneOf": [{"type": ["array", "object"]}, {"const": True}]}, {}) == {"array", "object", "boolean"}
    for unknown in ({}, None, True, {"anyOf": [{}, {"type": "string"}]}, {"$ref": "#/nothing"}, {"allOf": []}):
        assert types_of(unknown, {}) is None
    endless = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/b"}}}
    types_of({"$ref": "#/$defs/a"}, endless)
    types_of({"$ref": "#/$defs/b"}, endless)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<tool_call>\\n<function=' + tool_call.name + '>\\n'", "qwen3_coder"),
        ("'\\n<tool_call>' + tc.name }} <arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("set toolcall_begin_token = '<seed:tool_call>' ... '\\n<function='", "seed_oss"),
        ("set toolcall_begin_token = '<minimax:tool_call>' ... '<invoke name=\"' + tool_call.name", "minimax_m2"),
        ("'<function name=\"' ~ tool_call.name ~ '\">' }}{{- '<param name=\"'", "minicpm5"),
        ('<tool_call>\\n{"name": ', "hermes"),
    ],
)
def test_a_template_that_writes_tags_has_their_format(template, name):
    assert format_of_template(template).name == name


grammars = pytest.importorskip("messages.test_call_grammar")  # it needs llguidance
EXAMPLE = [
    ("f", {"text": "a\n<b>", "count": -3, "is on": True, "list": [1, 2.5], "unit": "c", "color": "true", "any": [1]}),
    ("stop", {}),
]


@EACH
def test_calls_as_models_write_them_are_allowed(writer):
    format, write = format_of(writer), WRITERS[writer]
    text = write(EXAMPLE)
    for choice in ("required", "auto"):
        assert grammars.accepts(call_grammar(format, TOOLS, choice), text)
    assert grammars.accepts(call_grammar(format, TOOLS, grammars.STOP), write(EXAMPLE[1:]))
    assert grammars.accepts(call_grammar(format, TOOLS, parallel=False), write(EXAMPLE[:1]))
    for grammar in (call_grammar(format, TOOLS, grammars.STOP), call_grammar(format, TOOLS, parallel=False)):
        assert not grammars.accepts(grammar, text)
    for wrong in ("", "Hello", write([("go", {})]), write([("f", {})]), write([("f", {"text": "a", "count": "b"})])):
        assert not grammars.accepts(call_grammar(format, TOOLS), wrong)


@pytest.mark.one_in(9)
@EACH
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_whatever_a_grammar_allows_is_a_call_that_the_schema_allows(writer, choice):
    format, num_calls = format_of(writer), 0
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    beginning = f"Well. {format.calls_region.open.texts[0]}" if choice == "auto" else ""
    for seed in range(40):
        text = grammars.drawn(call_grammar(format, tools, choice), Random(seed), beginning=beginning)
        if text is None:
            continue
        message = parse_message(text, format, tool_names=SCHEMAS, tool_schemas=SCHEMAS)
        assert message.tool_calls, text
        for call in message.tool_calls:
            num_calls += 1
            assert call.error is None, text
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert num_calls > 1


@pytest.mark.parametrize("properties", [{"a": {"type": "string", "maxLength": 3}}, {"a": {"$ref": "#/$defs/x"}}])
def test_a_strict_tool_whose_texts_the_notation_cannot_follow_is_refused(properties):
    parameters = {"properties": properties, "$defs": {"x": {"type": "string", "pattern": "a+"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters.*(maxLength|pattern)"):
        call_grammar(FORMATS["qwen3_coder"], [tool])


STRICT = {"type": "string", "enum": ["x", "y"]}


@pytest.mark.parametrize(
    ("parameters", "allowed", "others"),
    [
        ({"additionalProperties": False}, [{}], [{"a": 1}]),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"a": STRICT}, "required": ["a"]}}}, [{"a": "x"}], [{}]),
        ({"properties": {}, "required": ["a"]}, [{"a": "x"}], [{}]),
        ({"properties": {"a": False}}, [{}], [{"a": 1}]),
        ({"properties": {"a": {"anyOf": [STRICT, {"type": "null"}]}}}, [{"a": "x"}, {"a": None}], [{"a": "z"}]),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/d"}]}}, "$defs": {"d": STRICT}}, [{"a": "x"}], [{"a": "z"}]),
        ({"properties": {"a": {"oneOf": [STRICT, {"$ref": "#/properties/a"}]}}}, [{"a": "x"}], [{"a": "z"}]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"$ref": "#"}}, "b": {"type": "integer"}},
            },
            [{"a": [{"a": [], "b": 1}]}],
            [{"a": [1]}],
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}, STRICT]}, "b": {"$ref": "#/properties/a/anyOf/1"}}},
            [{"b": "x"}],
            [{"b": "z"}],
        ),
    ],
)
def test_the_arguments_of_a_strict_tool_follow_its_schema(parameters, allowed, others):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    grammar = call_grammar(FORMATS["qwen3_coder"], [tool])
    for arguments in allowed:
        assert grammars.accepts(grammar, qwen3_coder([("f", arguments)]))
    for arguments in others:
        assert not grammars.accepts(grammar, qwen3_coder([("f", arguments)]))


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"properties": {"a": {}}}]},
        {"properties": {}, "minProperties": 1},
        {"properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 3}]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}}},
        {"properties": {"a": {"$ref": "#/$defs/no"}}},
        {"$ref": "#/$defs/no"},
        {"properties": {}, "required": True},
    ],
)
def test_a_schema_that_tags_cannot_follow_is_refused(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters"):
        call_grammar(FORMATS["qwen3_coder"], [tool])


@pytest.mark.parametrize("special", [{}, {"<tool_call>": 254}])
def test_a_call_without_its_outer_tag_is_not_among_the_text_before_a_call(special):
    grammar = call_grammar(FORMATS["qwen3_coder"], TOOLS, "auto", special_token_ids=special)
    assert grammars.accepts(grammar, "Well. <function")
    assert not grammars.accepts(grammar, "Well. <function=go>")
    if not special:
        text = qwen3_coder([("stop", {})])
        assert grammars.accepts(grammar, f"Well. {text}")
        assert not grammars.accepts(grammar, f"Well. <function=go></function> {text}")


@pytest.mark.parametrize("special", [{}, {"</param>": 254}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_value_with_a_tag_is_quoted(special, choice):
    """Nothing but the end of the quotes ends such a value."""
    texts = ["</param></function>", "a ]] > b", "]]", ""]
    text = "".join(f'<function name="f"><param name="text"><![CDATA[{one}]]> </param></function>' for one in texts)
    for cuts in ((), EVERY):
        assert calls_of(read(text, "minicpm5", cuts)) == [("f", {"text": one}) for one in texts]
    assert read('<function name="f"><param name="text">a<![CDATA[', "minicpm5").tool_calls[0].arguments == (
        '{"text": "a<![CDATA['
    )
    grammar = call_grammar(FORMATS["minicpm5"], TOOLS, choice, special_token_ids=special)
    matcher = grammars.llguidance.LLMatcher(grammars.TOKENIZER, grammar)
    whole = '<function name="f"><param name="text"><![CDATA[<&>]]>'
    ids = [*whole.encode(), *([254] if special else b"</param>"), *b"</function>"]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert not grammars.accepts(grammar, '<function name="f"><param name="text">a<![CDATA[</param></function>')


def test_a_key_that_tags_cannot_have_is_refused():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a>b": {}}}}}
    with pytest.raises(RequestError, match=r"a>b.*cannot write"):
        call_grammar(FORMATS["qwen3_coder"], [tool])
