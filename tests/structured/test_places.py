"""An error of a JSON schema names the part that cannot be compiled, by its path in what was sent."""

import json

import pytest

from foreword.anthropic import parse_messages
from foreword.engine.chat import make_chat
from foreword.errors import RequestError
from foreword.models.tokenizer import Tokenizer
from foreword.openai import parse_chat, parse_responses
from foreword.structured import GrammarCompiler
from foreword.structured.places import MOST_TRIED, Place, refused_place
from models import vocabularies

pytest.importorskip("llguidance")

WRONG = {"type": "strin"}


@pytest.mark.parametrize(
    ("schema", "path", "part"),
    [
        (WRONG, "", WRONG),
        ({"properties": {"a": {}, "x": WRONG}}, ".properties.x", WRONG),
        ({"properties": {"a.b": WRONG}}, '.properties["a.b"]', WRONG),
        ({"anyOf": [{}, {"items": {"properties": {"x": WRONG}}}]}, ".anyOf[1].items.properties.x", WRONG),
        ({"items": [{}, WRONG]}, ".items[1]", WRONG),
        ({"$defs": {"q": WRONG}, "properties": {"x": {"$ref": "#/$defs/q"}}}, ".$defs.q", WRONG),
        ({"properties": {"x": {"enum": [WRONG]}}}, ".properties.x", {"enum": [WRONG]}),
    ],
)
def test_the_innermost_part_that_is_refused_is_found(schema, path, part):
    """With a refusal of every text that has the wrong type anywhere, also behind a reference to what the text has."""
    assert refused_place(schema, "wrong", lambda text: "wrong" if "strin" in text else None, 60) == Place(path, part)


def test_a_part_that_is_refused_for_another_reason_is_not_the_place():
    schema = {"properties": {"a": {"not": 1}, "x": WRONG}}
    reasons = {json.dumps({"not": 1}): "other", json.dumps(WRONG): "wrong"}
    assert refused_place(schema, "wrong", reasons.get, 60).path == ".properties.x"


def test_the_search_has_a_limit():
    tried = []
    schema = {"properties": {f"p{i}": {} for i in range(2 * MOST_TRIED)}}
    assert refused_place(schema, "wrong", lambda text: tried.append(text), 60) == Place("", schema)
    assert len(tried) == MOST_TRIED
    assert refused_place(schema, "wrong", lambda text: pytest.fail("no time is left"), -1) == Place("", schema)


TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "x": WRONG}}
TOOL = {"name": "f", "parameters": SCHEMA}
CHAT, MESSAGE = {"messages": USER}, {"model": "m", "max_tokens": 5, "messages": USER}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
BODIES = [
    (parse_chat, {**CHAT, "response_format": JSON_SCHEMA}, "response_format.json_schema.schema.properties.x"),
    (parse_chat, {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
     "response_format.schema.properties.x"),
    (parse_chat, {**CHAT, "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json.properties.x"),
    (parse_chat, {**CHAT, "response_format": {"type": "structural_tag", **TAG}},
     "response_format.structures[0].schema.properties.x"),
    (parse_chat, {**CHAT, "structured_outputs": {"structural_tag": TAG}},
     "structured_outputs.structural_tag.structures[0].schema.properties.x"),
    (parse_chat, {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
     "tools[0].function.parameters.properties.x"),
    (parse_responses, {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
     "text.format.schema.properties.x"),
    (parse_responses, {"input": "a", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
     "tools[0].parameters.properties.x"),
    (parse_messages, {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
     "output_config.format.schema.properties.x"),
    (parse_messages, {**MESSAGE, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
     "tools[0].input_schema.properties.x"),
]  # fmt: skip


def test_errors_of_nested_schemas_have_one_form_of_path_as_they_were_sent():
    tokenizer = Tokenizer.from_gguf(vocabularies.byte_level(chat_template=TEMPLATE))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[0])
    for parse, body, field in BODIES:
        request = parse(body)
        request = request.chat if parse is parse_responses else request
        chat = make_chat(tokenizer, request.messages, request.params, 1000, request.chat)
        with pytest.raises(RequestError, match="Invalid type: strin") as error:
            compiler.grammar("r", chat.params)
        assert error.value.renamed(request.origins).field == field
        assert error.value.value == repr(WRONG) or error.value.value == WRONG
