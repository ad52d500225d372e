"""Complaints of users of other servers, where no other test says it already.

The others: closed connections, tokenizing, metrics, aborts (test_request_routes), keys, limits, keep-alive comments
(test_access_and_limits), drain (test_process), calls at every boundary, refused grammars, equal answers in a crowd
(test_openai_routes), endless white space (tests/structured/test_compiler), slow compiling
(tests/structured/test_structured_engine), storms (test_storms).
"""

import json
import threading

import pytest
from server_rig import HI, TEMPLATE, frames_of, serving, with_template

from foreword.openai import stream

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, engine={"max_model_len": 256}) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 300, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a" * 250, "max_tokens": 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}),
        ("/v1/responses", {"input": "a" * 300}),
        ("/v1/messages", {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": "a" * 300}]}),
    ],
)
def test_a_prompt_is_never_cut_silently(server, path, body):
    """It is refused, or the answer says that the length was reached, and the usage has the whole prompt."""
    response = server.post(path, body)
    if response.status_code == 200:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["prompt_tokens"] == len(body["prompt"])
    else:
        assert response.status_code == 400
        assert "256" in response.text


def test_one_request_may_use_the_whole_context_beside_others(server):
    """Concurrency does not divide the context."""
    body = {"prompt": "a" * 100, "max_tokens": 156, "ignore_eos": True}
    answers = [server.later("/v1/completions", body) for _ in range(8)]
    assert [answer.result(60).json()["usage"]["total_tokens"] for answer in answers] == [256] * 8


def test_requests_run_at_the_same_time_without_any_setting(server):
    with server.held():
        body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
        answers = [server.later("/v1/completions", body) for _ in range(8)]
        server.wait_until(lambda: server.llm.num_unfinished == 8)
        before = server.steps
    for answer in answers:
        answer.result(60)
    assert server.steps - before < 2 * 50


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_with_a_schema_comes_after_the_thoughts(talker, tmp_path, is_stream):
    """Where the prompt opens the thoughts, they are free, and the schema holds for what follows them."""
    model = with_template(talker, tmp_path / "thinker", f"{TEMPLATE}<|im_start|>assistant<think>")
    script = 'Is it {"a"?</think>{"a":"y"}'
    with serving(model, script=script) as running:
        body = {"messages": HI, "response_format": FORMAT, "max_tokens": 100, "temperature": 0, "stream": is_stream}
        response = running.post("/v1/chat/completions", body)
        if is_stream:
            deltas = [frame["choices"][0]["delta"] for frame in frames_of(response.text)]
            found = {name: "".join(d.get(name, "") for d in deltas) for name in ("reasoning_content", "content")}
        else:
            found = response.json()["choices"][0]["message"]
    assert found["reasoning_content"] == 'Is it {"a"?'
    assert json.loads(found["content"])["a"] in ("x", "y")


def test_a_chunk_of_text_costs_no_encoding_of_an_object(server, monkeypatch):
    """The part that is equal in all chunks is encoded once."""
    encoded: list[object] = []
    encode = stream._json

    def counted(value):
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(stream, "_json", counted)
    frames = server.frames("/v1/completions", {"prompt": "a", "max_tokens": 60, "ignore_eos": True})
    assert len(frames) > 10
    assert len(encoded) < 6


def test_the_server_answers_while_a_prompt_is_computed(server):
    with server.held():
        answer = server.later("/v1/completions", {"prompt": "a", "max_tokens": 1})
        server.wait_until(lambda: server.llm.num_unfinished == 1)
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/version", "/tokenizer_info"):
            assert server.get(path).status_code == 200
        assert server.post("/tokenize", {"prompt": "abc"}).json()["count"] == 3
    answer.result(60)


def test_a_large_answer_is_written_outside_the_event_loop(server):
    threads: set[str] = set()
    token_bytes = server.llm.tokenizer.token_bytes

    def noted(token_id: int) -> bytes:
        threads.add(threading.current_thread().name)
        threads.discard("foreword-engine")  # reads the end of the prompt
        return token_bytes(token_id)

    server.llm.tokenizer.token_bytes = noted
    body = {"prompt": "a", "logprobs": 20, "ignore_eos": True}
    server.post("/v1/completions", {**body, "max_tokens": 3})
    of_loop = set(threads)
    threads.clear()
    server.post("/v1/completions", {**body, "max_tokens": 250})
    assert len(of_loop) == 1
    assert threads
    assert not of_loop & threads
