"""llama.cpp's routes besides /infill: completions, properties, and its forms of the tokenizer's routes."""

import json

import pytest
from server_rig import HI, serving

from foreword.errors import RequestError
from foreword.openai.llama import parse_llama

SCRIPT = "one\n  two\nthree"


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, script=SCRIPT) as found:
        yield found
        found.check_nothing_is_left()


def test_a_prompt_of_text_or_token_ids_is_completed(server):
    for prompt in ("Hi", [72, 105]):
        answer = server.post("/completion", {"prompt": prompt, "n_predict": 40}).json()
        assert (answer["content"], answer["stop"], answer["stop_type"]) == (SCRIPT, True, "eos")
        assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (2, len(SCRIPT) + 1)
    limited = server.post("/completion", {"prompt": "Hi", "n_predict": 3}).json()
    assert (limited["content"], limited["stop_type"]) == ("one", "limit")
    word = server.post("/completion", {"prompt": "Hi", "stop": ["two"]}).json()
    assert (word["content"], word["stop_type"]) == ("one\n  ", "word")
    assert server.post("/completion", {"prompt": "Hi", "n_predict": 0}).json()["content"] == ""


def test_a_stream_has_a_frame_per_piece_and_one_that_stops(server):
    body = {"prompt": "Hi", "n_predict": 40, "stream": True}
    text = server.post("/completion", body).text
    frames = [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n") if frame]
    assert "".join(frame["content"] for frame in frames) == SCRIPT
    assert [frame["stop"] for frame in frames] == [*[False] * (len(frames) - 1), True]
    assert frames[-1]["tokens_predicted"] == len(SCRIPT) + 1


def test_fields_of_the_answer_and_ends_of_lines_are_those_of_infill(server):
    body = {"prompt": "Hi", "n_indent": 1, "response_fields": ["content", "timings/prompt_n", "none"]}
    assert server.post("/completion", body).json() == {"content": "one\n  two\n", "timings/prompt_n": 2}


def test_parameters_have_llama_cpps_names_and_defaults():
    plain = parse_llama({"prompt": "x"}).params
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.max_tokens) == (0.8, 40, 0.95, 0.05, None)
    given = parse_llama({"prompt": "x", "repeat_penalty": 1.3, "n_predict": 7, "temperature": 0, "seed": 4}).params
    assert (given.repetition_penalty, given.max_tokens, given.temperature, given.seed) == (1.3, 7, 0, 4)
    assert parse_llama({"prompt": "x", "samplers": ["top_k"]}).params.min_p == 0
    schema = {"type": "object"}
    assert parse_llama({"prompt": "x", "json_schema": schema}).params.structured_outputs is not None
    assert parse_llama({"prompt": "x"}, suggested={"top_k": 3}).params.top_k == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "x", "grammar": 'root ::= "a"'}, "grammar"),
        ({"prompt": "x", "repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"prompt": "x", "mirostat": 2}, "mirostat"),
        ({"prompt": "x", "n_probs": 3}, "n_probs"),
        ({"prompt": "x", "samplers": ["top_p", "top_k"]}, "samplers"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_field(body, field):
    with pytest.raises(RequestError) as error:
        parse_llama(body)
    assert error.value.field == field


def test_the_properties_are_those_of_the_engine(server):
    props = server.get("/props").json()
    states = server.llm.engine.states
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (4096, states.max_num_reqs)
    assert (props["eos_token"], props["bos_token"], props["modalities"]) == (
        "<|end|>", "", {"vision": False, "audio": False},
    )  # fmt: skip
    assert "<|assistant|>" in props["chat_template"]


def test_the_routes_of_the_tokenizer_have_llama_cpps_forms_too(server):
    assert server.post("/tokenize", {"content": "Hi"}).json() == {"tokens": [72, 105]}
    pieces = server.post("/tokenize", {"content": "Hi", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}]
    assert len(server.post("/tokenize", {"content": "<|end|>", "parse_special": False}).json()["tokens"]) == 7
    assert server.post("/detokenize", {"tokens": [72, 105]}).json()["content"] == "Hi"
    assert server.post("/apply-template", {"messages": HI}).json() == {"prompt": "<|user|>Hi<|end|><|assistant|>"}
    assert server.post("/apply-template", {"prompt": "Hi"}).json()["error"]["param"] == "messages"
