"""Errors in the words of each interface, inputs that are no failure of the server, and failures in the log."""

from __future__ import annotations

import json
import re

import pytest
from server_rig import HI, serving, with_template

from computing import replace_compute
from foreword.engine.llm import LLM
from foreword.errors import EngineError
from foreword.openai.batch import Batch
from foreword.openai.batch_file import batch_lines

LENGTH = 256
LONG = "a" * 300
OPENAI = re.compile(
    rf"^This model's maximum context length is {LENGTH} tokens\. However, your (\w+) resulted in (\d+) tokens\."
    r" Please reduce the length of the \1\. "
)
ANTHROPIC = re.compile(rf"^prompt is too long: (\d+) tokens > ({LENGTH}|{LENGTH - 1}) maximum\. ")
TOO_LONG = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [97] * 300}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": LENGTH, "truncate_prompt_tokens": -1}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/embeddings", {"input": LONG}, "input"),
]


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, engine={"max_model_len": LENGTH}) as running:
        yield running


@pytest.fixture(scope="module")
def plain(talker, tmp_path_factory):
    """A model without a chat template."""
    with serving(with_template(talker, tmp_path_factory.mktemp("plain") / "model", None)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG)
def test_a_prompt_that_is_too_long_has_openais_code_and_words(server, path, body, param, stream):
    response = server.post(path, body | ({"stream": True} if stream and path != "/v1/embeddings" else {}))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    found = OPENAI.match(error["message"])
    assert found is not None, error
    assert found[1] == {"prompt[1]": "prompt", "max_tokens": "request"}.get(param, param)
    assert int(found[2]) > LENGTH - 1
    assert f"{param} = " in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_anthropics_words(server, stream):
    messages = [{"role": "user", "content": LONG}]
    response = server.post("/v1/messages", {"model": "talker", "max_tokens": 1, "messages": messages, "stream": stream})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    found = ANTHROPIC.match(response.json()["error"]["message"])
    assert found is not None
    assert int(found[1]) > int(found[2])


def test_a_line_of_a_batch_has_the_same_error(talker):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
        "/v1/completions": {"prompt": LONG},
    }
    lines = [
        json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}).encode()
        for url, body in bodies.items()
    ]
    with LLM(str(talker), executor="numpy", max_model_len=LENGTH) as llm:
        records = list(Batch(llm, ["m"], ordered=True).run(batch_lines(lines)))
        for record, param in zip(records, ("messages", "prompt"), strict=True):
            error = record["response"]["body"]["error"]
            assert (record["response"]["status_code"], error["code"]) == (400, "context_length_exceeded")
            assert OPENAI.match(error["message"])[1] == param == error["param"]


NEEDS_A_TEMPLATE = [
    ("/v1/chat/completions", {"messages": HI}, "messages"),
    ("/v1/responses", {"input": "Hi"}, "input"),
    ("/v1/messages", {"model": "talker", "max_tokens": 1, "messages": HI}, "messages"),
    ("/v1/messages/count_tokens", {"model": "talker", "messages": HI}, "messages"),
    ("/tokenize", {"messages": HI}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "field"), NEEDS_A_TEMPLATE)
def test_a_model_without_a_chat_template_refuses_messages_as_the_fault_of_the_request(plain, path, body, field):
    response = plain.post(path, body)
    assert response.status_code == 400
    assert "the model has no chat template" in response.json()["error"]["message"]
    assert field in response.json()["error"]["message"]


def test_a_failure_is_logged_with_its_request_and_reason(talker, capfd, monkeypatch):
    with serving(talker) as running:
        for kind in (EngineError, KeyError):

            def fail(*args, kind=kind, **options):
                raise kind("broken on purpose")

            with monkeypatch.context() as patch:
                patch.setattr(running.llm, "check", fail)
                headers = {"X-Request-Id": f"id-{kind.__name__}"}
                assert running.post("/v1/completions", {"prompt": "a"}, headers=headers).status_code == 500
        assert running.post("/v1/completions", {"prompt": LONG, "max_tokens": 0}).status_code == 400
        timed = running.post("/v1/completions", {"prompt": "a", "max_tokens": 2000, "timeout": 1e-3})
        assert timed.status_code == 504
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [(line["request_id"], line["status"], line["error"]) for line in lines[:2]] == [
        ("id-EngineError", 500, "EngineError: broken on purpose"),
        ("id-KeyError", 500, "KeyError: 'broken on purpose'"),
    ]
    assert (lines[2]["status"], lines[2]["request_id"]) == (504, timed.headers["x-request-id"])
    assert len(lines) == 3


def test_a_stream_that_fails_is_logged(talker, capfd):
    with serving(talker) as running:
        compute = running.llm.engine.executor.compute

        def broken(batch, logits_indices):
            logits = compute(batch, logits_indices)
            if running.steps > 3:
                logits[:] = float("nan")
            return logits

        replace_compute(running.llm.engine.executor, broken)
        with running.client() as client:
            body = {"prompt": "a", "max_tokens": 50, "stream": True}
            text = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}).text
        assert "infinite logits" in text
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert (line["request_id"], line["status"]) == ("mine", 200)
    assert "NaN or infinite logits" in line["error"]


def test_a_post_without_a_body_works_where_nothing_is_needed(server):
    with server.client() as client:
        assert client.post("/reset_prefix_cache").json() == {"reset": True}
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert client.post("/reset_prefix_cache", headers=form).json() == {"reset": True}
        needed = {"/abort": "request_id", "/v1/chat/completions": "messages", "/v1/completions": "prompt"}
        for path, field in needed.items():
            response = client.post(path)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert client.post("/reset_prefix_cache", content=b"a=b", headers=form).status_code == 415


def test_a_page_of_another_origin_cannot_post_without_a_body(server):
    with server.client() as client:
        refused = client.post("/reset_prefix_cache", headers={"Origin": "https://elsewhere.example"})
        assert (refused.status_code, "cors_origin" in refused.json()["error"]["message"]) == (403, True)
        own = {"Origin": server.url, "Host": server.url.partition("://")[2]}
        assert client.post("/reset_prefix_cache", headers=own).status_code == 200
