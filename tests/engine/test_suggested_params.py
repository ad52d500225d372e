"""The sampling that a model's files suggest is that of requests which leave it open."""

import json
from dataclasses import fields, replace

import pytest

from foreword import LLM, SamplingParams
from foreword.anthropic import parse_messages
from foreword.cli.sampling_options import GivenParams
from foreword.engine.defaults import DEFAULT_PARAMS, suggested_params
from foreword.errors import ConfigError, ModelError
from foreword.models.generation_files import Suggestions
from foreword.openai import parse_chat, parse_completion, parse_responses
from foreword.openai.batch import Batch
from foreword.openai.batch_file import BatchLine
from models.gguf_models import write
from models.recorded import TINY
from models.tiny import random_tensors, write_model

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
SMALL = {"executor": "numpy", "kv_cache_bytes": 1 << 20}
USER = [{"role": "user", "content": "a"}]


@pytest.fixture
def folder(tmp_path):
    tiny = TINY["llama3"]
    return write_model(tmp_path / "model", tiny["config"], random_tensors(tiny["shapes"]))


def suggesting(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "params", "others"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}, {}),
        ({"min_p": 0.1, "typical_p": 0.5}, {"min_p": 0.1, "typical_p": 0.5}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}, {}),
        ({"do_sample": True, "max_new_tokens": 7}, {"temperature": 1.0, "max_tokens": 7}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 3}, {"temperature": 0.0, "top_k": 3}, {}),
        ({"max_length": 20}, {}, {"max_length": 20}),
        # llama.cpp
        ({"temp": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.2},
         {"temperature": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.2}, {}),
        ({"penalty_repeat": 1.1, "penalty_last_n": -1}, {"repetition_penalty": 1.1}, {}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64}, {}, {"penalty_repeat": 1.1, "penalty_last_n": 64}),
        ({"penalty_repeat": 1.1}, {}, {"penalty_repeat": 1.1}),
        ({"mirostat": 2, "sequence": "kp"}, {}, {"mirostat": 2, "sequence": "kp"}),
    ],
)  # fmt: skip
def test_suggestions_are_the_parameters_of_the_same_meaning(values, params, others):
    suggested = Suggestions("file", values)
    assert suggested_params(suggested) == params
    assert suggested.without_parameter() == others
    assert params.keys() <= {field.name for field in fields(SamplingParams)}


def test_requests_without_parameters_have_those_of_the_model(folder):
    with LLM(suggesting(folder, **QWEN3, max_new_tokens=3, top_n_sigma=5), **SMALL) as llm:
        expected = replace(DEFAULT_PARAMS, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=3)
        assert llm.default_sampling_params() == llm.engine.default_params == expected
        group = llm.engine.check("a", [3, 4], None)
        assert replace(group.params, dry_breaker_token_ids=()) == expected
        assert len(llm.generate([[3, 4]], progress=False)[0].outputs[0].token_ids) <= 3
        assert llm.engine.notes[0].startswith("the model suggests temperature = 0.6, top_k = 20, top_p = 0.95, ")
        own = SamplingParams(temperature=0.9)
        assert llm.engine.check("b", [3, 4], own).params == own


def test_a_greedy_request_has_the_suggested_penalty(folder):
    with LLM(suggesting(folder, repetition_penalty=50.0), **SMALL) as llm:
        default, free = llm.default_sampling_params(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        punished = replace(free, repetition_penalty=50.0)
        got, want, other = (
            llm.generate([[3, 4, 5]], params, progress=False)[0].outputs[0].token_ids
            for params in (replace(default, max_tokens=8, ignore_eos=True), punished, free)
        )
        assert got == want != other


def test_without_suggestions_and_with_ignore_the_defaults_are_ours(folder):
    with LLM(str(folder), **SMALL) as llm:
        assert llm.default_sampling_params() == DEFAULT_PARAMS
        assert (llm.engine.suggested, llm.engine.notes) == ({}, [])
    with LLM(suggesting(folder, **QWEN3), generation_config="ignore", **SMALL) as llm:
        assert (llm.default_sampling_params(), llm.engine.suggested) == (DEFAULT_PARAMS, {})
    with pytest.raises(ConfigError, match="generation_config='auto': must be one of 'model', 'ignore'"):
        LLM(str(folder), generation_config="auto", **SMALL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature = 'hot': expected a number"),
        ({"top_p": 0}, "top_p = 0: must be > 0 and ≤ 1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be ≥ 1"),
        ({"top_k": 2.5}, "top_k = 2.5: expected an integer"),
        ({"min_p": float("nan")}, "min_p = nan: must be"),
    ],
)
def test_a_suggestion_that_cannot_be_names_file_key_value_and_fix(folder, values, message):
    model = suggesting(folder, **values)
    with pytest.raises(ModelError) as error:
        LLM(model, **SMALL)
    assert str(error.value).startswith(f"{folder}/generation_config.json: {message}")
    assert str(error.value).endswith("Correct the file, or give generation_config='ignore'")
    with LLM(model, generation_config="ignore", **SMALL) as llm:
        assert llm.default_sampling_params() == DEFAULT_PARAMS


def test_do_sample_of_another_type_is_refused(folder):
    with pytest.raises(ModelError, match="do_sample is 'x', not of type bool"):
        LLM(suggesting(folder, do_sample="x"), **SMALL)


@pytest.mark.parametrize("name", ["epsilon_cutoff", "eta_cutoff"])
def test_a_cutoff_that_no_parameter_has_is_refused(folder, name):
    with pytest.raises(ModelError, match=f"{name} = 0.1 is not supported"):
        LLM(suggesting(folder, **{name: 0.1}), **SMALL)
    LLM(suggesting(folder, **{name: 0.0}), **SMALL).close()


def test_a_gguf_file_suggests_too(tmp_path):
    tiny = TINY["llama-linear-tied"]
    more = {"general.sampling.temp": ("f32", 0.5), "general.sampling.top_k": ("i32", 20)}
    path = write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more)
    with LLM(str(path), **SMALL) as llm:
        assert llm.engine.suggested == {"temperature": 0.5, "top_k": 20}


BODIES = {
    parse_chat: {"messages": USER},
    parse_completion: {"prompt": "a"},
    parse_responses: {"input": "a"},
    parse_messages: {"model": "m", "max_tokens": 9, "messages": USER},
}
SUGGESTED = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 7}


def params_of(parse, suggested=SUGGESTED, **given):
    request = parse({**BODIES[parse], **given}, suggested)
    return (request.chat if parse is parse_responses else request).params


@pytest.mark.parametrize("parse", BODIES)
def test_bodies_have_suggestions_for_the_fields_that_they_leave_open(parse):
    plain = params_of(parse, {})
    limit = {"max_tokens": 9} if parse is parse_messages else {"max_tokens": 7}
    assert params_of(parse) == replace(plain, temperature=0.6, top_k=20, repetition_penalty=1.05, **limit)
    assert params_of(parse, temperature=None, top_k=None) == params_of(parse)
    own = {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.0}
    assert params_of(parse, **own) == replace(plain, **own, **limit)


@pytest.mark.parametrize(
    ("parse", "name"),
    [(parse_chat, "max_tokens"), (parse_chat, "max_completion_tokens"), (parse_completion, "max_tokens"),
     (parse_responses, "max_output_tokens")],
)  # fmt: skip
def test_a_limit_of_a_body_replaces_the_suggested_one(parse, name):
    assert params_of(parse, **{name: 3}).max_tokens == 3
    assert params_of(parse, **{name: -1}).max_tokens is None
    assert params_of(parse, **{name: None}).max_tokens == 7


def test_a_response_repeats_the_suggested_values():
    assert parse_responses(BODIES[parse_responses], {"temperature": 0.6, "top_p": 0.5}).echo["temperature"] == 0.6


def test_lines_of_a_batch_have_the_suggestions_of_its_model(folder):
    with LLM(suggesting(folder, max_new_tokens=3, temperature=0.0), **SMALL) as llm:
        lines = [
            BatchLine(i, str(i), "/v1/completions", {"prompt": [3, 4], "ignore_eos": True, **more})
            for i, more in enumerate(({}, {"max_tokens": 5}))
        ]
        counts = {
            record["custom_id"]: record["response"]["body"]["usage"]["completion_tokens"]
            for record in Batch(llm, ["m"]).run(iter(lines))
        }
        assert counts == {"0": 3, "1": 5}


def test_options_of_a_command_come_before_suggestions():
    default = replace(DEFAULT_PARAMS, temperature=0.6, top_k=20)
    given = GivenParams({"temperature": 0.0, "min_tokens": 5000, "max_tokens": None})
    assert given.over(default) == replace(default, temperature=0.0, min_tokens=5000, max_tokens=None)
    assert given.remarks({"temperature": 0.6, "top_k": 20}) == ["as the model suggests, top_k = 20"]
    assert given.remarks({"temperature": 0.6}) == given.remarks({}) == []
