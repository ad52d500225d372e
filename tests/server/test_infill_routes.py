"""Gaps in texts over HTTP: /infill of llama.cpp, and the suffix of completions."""

import json

import pytest
from server_rig import serving

from foreword import LLM, SamplingParams
from foreword.openai.infill import LineEnd
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


CHUNK = {"text": "a", "time": [1732, 55], "filename": "b.py"}
PREPARE = {
    "input_prefix": "", "input_suffix": "", "input_extra": [CHUNK], "prompt": "", "n_predict": 0, "samplers": [],
    "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
}  # fmt: skip
FILL = {
    "input_prefix": "", "input_suffix": AFTER, "input_extra": [{**CHUNK, "time": 1732000000000}], "prompt": BEFORE,
    "n_predict": 5, "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {**PREPARE, "temperature": 0.0, "stream": False, "response_fields": [""]},  # llama.vim
        {**FILL, "n_indent": 4, "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"]},
        PREPARE,  # llama.vscode
        {**FILL, "n_indent": 4},
        FILL,
    ],
)
def test_the_requests_of_editors_are_served(server, body):
    response = server.post("/infill", body)
    assert response.status_code == 200, response.text
    content = response.json().get("content")
    assert content == "" if body["n_predict"] == 0 and "response_fields" not in body else content != ""


TEXT = "\1\n    \3\n   \4\n"  # in the vocabulary, whose 2 ends a text


@pytest.fixture(scope="module")
def reciting(path):
    with serving(path, script=TEXT, engine={"max_model_len": 64}) as running:
        yield running
        running.check_nothing_is_left()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("indent", "want", "reason"),
    [(0, TEXT, "limit"), (3, TEXT, "limit"), (4, "\1\n    \3\n   ", "limit"), (5, "\1\n    ", "limit")],
)
def test_a_line_that_is_indented_less_ends_the_completion(reciting, indent, want, reason, stream):
    body = {"input_prefix": BEFORE, "n_predict": len(TEXT), "n_indent": indent, "stream": stream}
    response = reciting.post("/infill", body)
    if stream:
        frames = [json.loads(frame.removeprefix("data: ")) for frame in response.text.split("\n\n") if frame]
    else:
        frames = [response.json()]
    assert "".join(frame["content"] for frame in frames) == want
    assert frames[-1]["stop_type"] == reason


def test_a_completion_ends_after_its_time_once_it_has_an_end_of_a_line(reciting):
    body = {"input_prefix": BEFORE, "n_predict": len(TEXT), "t_max_predict_ms": 0.001}
    found = reciting.post("/infill", body).json()["content"]
    assert found.startswith("\1\n")
    assert len(found) < len(TEXT)  # some tokens may arrive at the same time
    assert reciting.post("/infill", {**body, "t_max_predict_ms": 60_000}).json()["content"] == TEXT
    assert reciting.post("/infill", {**body, "t_max_predict_ms": -1}).json()["content"] == TEXT


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("text", ["ab", "\n  a\n  b\nc", "a\n\n  b", "  a\n \t\tb\n\tc", "a\n", "a\n    ", "a\n   \n"])
def test_the_end_of_a_completion_is_that_of_its_first_line_with_too_few_blanks(text, size):
    want = first = text.find("\n") + 1
    for line in text[first:].splitlines(keepends=True) if first else []:
        margin = len(line) - len(line.lstrip(" \t"))
        if margin < 2 and len(line) > margin:
            want += margin
            break
        want += len(line)
    else:
        want = None
    end, found = LineEnd(2, 0), None
    for at in range(0, len(text), size):
        found = end.find(text[at : at + size])
        if found is not None:
            found += at
            break
    assert found == want


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"samplers": ["mirostat"]}, "samplers"),
        ({"samplers": ["top_k", "top_p", "temperature"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": ["top_k"], "top_p": 0.9}, "top_p"),
        ({"samplers": "kpt"}, "samplers"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_indent": 2**70}, "n_indent"),
        ({"t_max_predict_ms": "1"}, "t_max_predict_ms"),
        ({"input_extra": [{"text": "a", "time": "now"}]}, "input_extra[0].time"),
    ],
)
def test_what_cannot_be_followed_is_refused(server, more, field):
    response = server.post("/infill", {"input_prefix": "a", "n_predict": 1, **more})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
