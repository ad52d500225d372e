"""JSON schemas: what a grammar accepts is valid, by an independent validator; and so are a real model's outputs."""

import json
from pathlib import Path

import jsonschema
import pytest
from bytes_tokenizer import BytesTokenizer, grammar
from schemas import DATA, FUNCTIONS, check_outputs

from foreword import LLM
from foreword.errors import RequestError
from foreword.native import available

SUITE = json.loads((DATA / "test_suite.json").read_text())


def accepts(schema: object, value: object) -> bool | None:
    """Return whether the grammar takes the value as a whole output; None for a schema that is refused."""
    try:
        ours = grammar({"json": schema if isinstance(schema, dict) else json.dumps(schema)})
    except RequestError:
        return None
    tokens = BytesTokenizer().encode(json.dumps(value, ensure_ascii=False))
    return ours.accept(tokens) == len(tokens) and (ours.is_terminated or ours.accept([0]) == 1)


@pytest.mark.parametrize("keyword", SUITE)
def test_an_accepted_value_is_valid(keyword: str):
    for case in SUITE[keyword]:
        for value, is_valid in case["tests"]:
            if accepts(case["schema"], value):
                assert is_valid, (case["schema"], value)


def test_most_schemas_of_the_suite_are_followed_and_most_valid_values_accepted():
    cases = [
        (accepts(case["schema"], value), is_valid)
        for cases in SUITE.values() for case in cases for value, is_valid in case["tests"]
    ]  # fmt: skip
    followed = [found for found, is_valid in cases if found is not None and is_valid]
    assert len(followed) > 150
    assert sum(followed) > 0.7 * len(followed)


def test_the_schemas_of_functions_are_followed():
    refused = [name for name, schema in FUNCTIONS.items() if accepts(schema, 0) is None]
    assert len(refused) <= 0.05 * len(FUNCTIONS)


@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_a_real_models_outputs_parse_and_are_valid(smollm2_path: Path):
    tally = check_outputs(LLM(str(smollm2_path), max_model_len=512), 12, max_tokens=150, batch=12)
    assert not tally.wrong
    assert set(tally.ends) <= {"stop", "length"}
    assert tally.ends["stop"] >= 6


def test_the_validator_finds_what_is_wrong():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"age": "x"}, {"properties": {"age": {"type": "integer"}}})
