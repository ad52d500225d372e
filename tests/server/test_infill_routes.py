"""Gaps in texts over HTTP: /infill of llama.cpp, and the suffix of completions."""

import json

import pytest
from server_rig import serving

from foreword import LLM, SamplingParams
from models.infill_models import TEXTS, write_model_with_gaps

BEFORE, AFTER = TEXTS
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model_with_gaps(tmp_path_factory.mktemp("infill"))


@pytest.fixture(scope="module")
def server(path):
    with serving(path, engine={"max_model_len": 64}) as running:
        yield running
        running.check_nothing_is_left()


@pytest.fixture(scope="module")
def want(path):
    with LLM(str(path), executor="numpy") as llm:
        [output] = llm.infill(BEFORE, AFTER, SamplingParams(max_tokens=5, **GREEDY))
        return output.outputs[0].text


def test_a_gap_is_filled_as_by_llm_infill(server, want):
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 5, **GREEDY}
    answer = server.post("/infill", body).json()
    assert answer["content"] == want
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"]
    text = server.post("/infill", {**body, "stream": True}).text
    frames = [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n") if frame]
    assert "".join(frame["content"] for frame in frames) == want
    assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]


def test_prompt_follows_the_prefix_and_other_files_come_first(server, want):
    body = {"input_prefix": BEFORE[:1], "prompt": BEFORE[1:], "input_suffix": AFTER, "n_predict": 5, **GREEDY}
    assert server.post("/infill", body).json()["content"] == want
    extra = {"input_extra": [{"text": "a", "filename": "b"}], "response_fields": ["tokens_evaluated", "none"]}
    answer = server.post("/infill", {**body, **extra}).json()
    assert answer.keys() == {"tokens_evaluated"}


def test_the_suffix_of_completions_is_filled_as_well(server, want):
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 5, **GREEDY}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == want


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/completions", {"prompt": [5, 6], "suffix": "a"}, "prompt[0]"),
        ("/v1/completions", {"prompt": "a", "suffix": "a", "echo": True}, "echo"),
        ("/infill", {"input_prefix": 3}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "n": 2}, "n"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
    ],
)
def test_what_cannot_be_filled_names_the_field(server, route, body, field):
    assert server.post(route, body).json()["error"]["param"] == field
