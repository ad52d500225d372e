"""The public face of the package: names, errors, outputs, and its words about mistakes."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest

import foreword
import foreword.batch
from foreword import ContextLengthError, ForewordError, RequestError, RequestOutput, SamplingParams
from foreword.engine.outputs import CompletionOutput, Position, Transcript
from foreword.sampling import Logprob, TokenLogprobs
from foreword.sampling.logprobs import LogprobArrays


@pytest.mark.parametrize("package", [foreword, foreword.batch])
def test_a_package_shows_the_names_that_it_has(package):
    assert set(dir(package)) == set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="Nonsense"):
        getattr(package, "Nonsense")  # noqa: B009


def test_every_error_of_the_package_is_a_name_of_it():
    names = {one.__name__ for one in vars(foreword.errors).values() if isinstance(one, type)}
    errors = {name for name in names if issubclass(getattr(foreword.errors, name), ForewordError)}
    assert errors <= set(foreword.__all__)


def test_the_traceback_of_a_wrong_parameter_is_at_the_mistake():
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature="hot", max_tokens=0)
    assert caught.value.field == "max_tokens"
    assert any("SamplingParams(temperature=" in (frame.line or "") for frame in traceback.extract_tb(caught.tb))


def test_an_error_with_another_field_or_request_says_so_and_survives_copies():
    error = ContextLengthError(None, "prompt", "9 tokens", "r", "f", num_tokens=9, longest=7, max_model_len=8)
    other = error.renamed({"prompt": "input"}).of_request("a")
    assert str(other) == "request 'a': input = '9 tokens': r. f"
    assert str(error) == "prompt = '9 tokens': r. f"
    assert error.renamed({"promp": "x"}) is error
    for copied in (copy.copy(other), pickle.loads(pickle.dumps(other))):
        assert (str(copied), copied.num_tokens, copied.code) == (str(other), 9, "context_length_exceeded")


def output() -> RequestOutput:
    arrays = LogprobArrays.for_counts(np.array([1]))
    arrays.ids[:], arrays.logprobs[:], arrays.ranks[:] = [1, 2], [-1.0, -0.5], [2, 1]
    entry = TokenLogprobs(arrays)
    entry.token_bytes = {1: b"a", 2: b"\xc3"}.__getitem__
    transcript = Transcript(["a" * 200], [1], [entry])
    return RequestOutput("r", "p", [1] * 300, [CompletionOutput(0, transcript, Position(), transcript.end, "stop")])


def test_an_output_has_its_text_a_short_repr_and_a_form_for_json():
    made = output()
    assert made.text == "a" * 200
    assert len(repr(made)) < 400
    assert "300 prompt tokens" in repr(made)
    found = json.loads(json.dumps(made.as_dict()))
    assert found["outputs"][0]["text"] == made.text
    assert found["prompt_token_ids"] == made.prompt_token_ids
    assert found["outputs"][0]["logprobs"] == [
        [
            {"token_id": 1, "token": "a", "logprob": -1.0, "rank": 2},
            {"token_id": 2, "token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.5, "rank": 1},
        ]
    ]


def test_a_log_probability_has_the_text_of_its_token_also_after_a_copy():
    entry = pickle.loads(pickle.dumps(output())).outputs[0].logprobs[0]
    assert [found.decoded_token for found in entry.values()] == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert entry[1] == Logprob(-1.0, 2)
    assert Logprob(-1.0, 2).decoded_token is None


def test_properties_of_classes_are_made_of_functions():
    """Python 3.13 and later read the code of each property of a data class with slots; an attrgetter has none."""
    for path in Path(foreword.__file__).parent.rglob("*.py"):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        made = [part for one in classes for part in one.body if isinstance(part, ast.Assign | ast.AnnAssign)]
        for part in made:
            is_property = isinstance(part.value, ast.Call) and ast.unparse(part.value.func) == "property"
            assert not is_property, f"{path}:{part.lineno}: use @property"
