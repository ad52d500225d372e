"""Structured outputs as values of a request."""

import json
from dataclasses import dataclass, replace

import pytest
from typing_extensions import TypedDict

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.errors import RequestError

VALID = [
    ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
    ({"json": '{"type":"object"}'}, "json", '{"type":"object"}'),
    ({"json": True}, "json", '{"type": "object"}'),
    ({"json_object": True}, "json", '{"type": "object"}'),
    ({"regex": "a+", "json": None}, "regex", "a+"),
    ({"choice": ("a", 'b"')}, "choice", '["a", "b\\""]'),
    ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"structural_tag": {"triggers": []}}, "structural_tag", '{"triggers": []}'),
]


@pytest.mark.parametrize(("given", "kind", "text"), VALID)
def test_a_mapping_becomes_a_value(given, kind, text):
    params = SamplingParams(structured_outputs=given)
    made = params.structured_outputs
    assert made == StructuredOutputs(kind=kind, text=text)
    assert replace(params, n=2).structured_outputs is made
    assert {made: 1}[StructuredOutputs.of(given)] == 1
    assert StructuredOutputs.of(json.loads(json.dumps(made.mapping()))) == made


def test_options_are_part_of_the_value_and_a_changed_schema_is_not():
    schema = {"type": "object"}
    options = {"max_whitespace": 3, "disable_additional_properties": True}
    params = SamplingParams(structured_outputs={"json": schema, **options})
    schema["type"] = "array"
    assert params.structured_outputs == StructuredOutputs(kind="json", text='{"type": "object"}', **options)
    assert params.structured_outputs.mapping() == {"json": '{"type": "object"}', **options}


class Place(TypedDict):
    name: str


@dataclass
class Point:
    x: int


def test_a_type_is_its_schema():
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("City", name=(str, ...), at=(Point, None))
    types = {model: model.model_json_schema()}
    for kind in (Place, Point, list[model], int | None):
        types[kind] = pydantic.TypeAdapter(kind).json_schema()
    for kind, schema in types.items():
        params = SamplingParams(structured_outputs={"json": kind})
        assert params.structured_outputs == SamplingParams(structured_outputs={"json": schema}).structured_outputs
    with pytest.raises(RequestError, match=r"structured_outputs\.json = .*Plain.*: the type has no JSON schema"):
        StructuredOutputs.of({"json": type("Plain", (), {})})


def test_where_a_value_comes_from_does_not_make_it_another_one():
    schema = {"type": "object"}
    made = StructuredOutputs.of_schema(schema, Origin("text.format.schema", schema))
    assert made == StructuredOutputs.of({"json": schema})
    assert str(made.refusal("a", "is odd", "Use another.")).startswith("request 'a': text.format.schema = {'type': ")
    with pytest.raises(RequestError, match=r"^text.format.schema = 5: expected a dictionary"):
        StructuredOutputs.of_schema(5, Origin("text.format.schema", 5))


class Raises(dict):
    def items(self):
        raise RuntimeError("no items")


CYCLE: dict = {}
CYCLE["a"] = CYCLE


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("json", "expected a mapping"),
        (Raises(), "cannot be read: no items"),
        ({}, "expected exactly one of json, json_object"),
        ({"json": True, "regex": "a"}, r"\['json', 'regex'\]: expected exactly one"),
        ({"json_schema": {}}, r"'json_schema': is unknown. Here it is 'json'"),
        ({1: 2, "json": True}, "1: is unknown"),
        ({"choices": ["a"]}, "Did you mean 'choice'"),
        ({"json": False}, r"\.json = False: expected a dictionary or JSON text"),
        ({"json": 3}, "expected a dictionary or JSON text"),
        ({"json": {"a": {1, 2}}}, "is not JSON: Object of type set"),
        ({"json": CYCLE}, "has more than 131072 characters"),
        ({"json_object": False}, "expected True"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "expected a string"),
        ({"choice": "yes"}, "expected a list of strings"),
        ({"choice": []}, "expected a list of strings"),
        ({"choice": ["a", 3]}, "expected strings"),
        ({"choice": ["a", ""]}, "expected strings that are not empty"),
        ({"json": True, "disable_any_whitespace": 1}, r"\.disable_any_whitespace = 1: expected a bool"),
        ({"json": True, "max_whitespace": 65}, r"must be an integer in \[0, 64\]"),
        ({"json": True, "max_whitespace": True}, "must be an integer"),
        ({"json": True, "max_whitespace": 2, "disable_any_whitespace": True}, "contradicts"),
        ({"regex": "a", "max_whitespace": 2}, "is an option of JSON, not of 'regex'"),
    ],
)
def test_what_is_no_such_mapping_is_refused_when_it_is_given(given, reason):
    with pytest.raises(RequestError, match=rf"^structured_outputs.*{reason}"):
        SamplingParams(structured_outputs=given)
    with pytest.raises(RequestError, match=rf"request 'a': structured_outputs.*{reason}"):
        StructuredOutputs.of(given, "a")
