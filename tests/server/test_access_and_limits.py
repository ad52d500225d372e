"""Keys, limits of requests, and errors of routes."""

import asyncio
import contextlib
import json
import re
import socket
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_rig import HI, serving
from starlette.routing import Mount

from foreword.errors import ConfigError
from foreword.server import reply
from foreword.server.access import Hosts
from foreword.server.admission import Admission
from foreword.server.app import make_app
from foreword.server.bodies import LARGE, Bodies, HeldBody
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.server.errors import HttpError
from foreword.server.listener import MOST_DIGITS, short_integers
from foreword.server.run import bound_socket


@pytest.fixture(scope="module")
def guarded(talker):
    with serving(talker, api_key=("one", "two"), admin_key="root", cors_origin=("https://a.b",)) as running:
        yield running


def test_an_admin_key_alone_leaves_the_other_routes_open(talker):
    with serving(talker, admin_key="root") as running:
        assert running.get("/v1/models").status_code == 200
        assert running.get("/requests").status_code == 401


def test_an_application_under_a_prefix_needs_the_same_keys(guarded):
    async def statuses(key: str) -> list[int]:
        transport = httpx.ASGITransport(Mount("/inner", make_app(guarded.context)))
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            return [(await client.get(f"/inner{path}")).status_code for path in ("/health", "/version", "/requests")]

    assert asyncio.run(statuses("none")) == [200, 401, 401]
    assert asyncio.run(statuses("one")) == [200, 200, 401]


KEY = {"Authorization": "Bearer one"}


def test_a_page_of_another_origin_may_call_only_if_it_is_allowed(guarded, talker):
    asks = {"Origin": "https://a.b", "Access-Control-Request-Method": "POST"}
    with guarded.client() as client:
        assert client.options("/v1/completions", headers=asks).headers["access-control-allow-origin"]
        other = client.options("/v1/completions", headers={**asks, "Origin": "https://c.d"})
    assert "access-control-allow-origin" not in other.headers
    with serving(talker) as running, running.client() as client:
        closed = client.options("/v1/completions", headers=asks)
    assert "access-control-allow-origin" not in closed.headers


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "no"),
        ({"api_key": ("k",)}, "any"),
        ({"host": "0.0.0.0"}, "any"),
        ({"allowed_host": ("models.example",)}, "given"),
        ({"allowed_host": ("models.example",), "api_key": ("k",), "host": "0.0.0.0"}, "given"),
        ({"allowed_host": ("*",)}, "any"),
    ],
)
def test_a_page_that_leads_its_name_to_a_server_without_keys_is_refused(settings, names):
    hosts = Hosts(ServerConfig(**settings))
    for host in ("localhost", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.0.2.7", ""):
        hosts.check({b"host": host.encode()})
    for host, allowed in (("evil.example", names == "any"), ("models.example:80", names != "no")):
        with (
            contextlib.nullcontext()
            if allowed
            else pytest.raises(HttpError, match="is not a name of this server") as refused
        ):
            hosts.check({b"host": host.encode()})
        assert allowed or refused.value.status == 421


def test_another_model_is_not_found(guarded):
    response = guarded.post("/v1/completions", {"prompt": "a", "model": "gpt"}, headers=KEY)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    body = guarded.post("/v1/completions", {"prompt": "a", "model": "other", "max_tokens": 1}, headers=KEY).json()
    assert body["model"] == "other"


def test_the_access_log_is_one_object_per_request(talker, capfd):
    with serving(talker, access_log=True) as running:
        running.get("/health")
        running.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/health", 200),
        ("POST", "/v1/chat/completions", 200),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_key": "a"},
        {"router": "best"}, {"kv_events_replay": "tcp://*:5558"}, {"kv_events_topic": "a"}, {"kv_events_arrays": True},
        {"adapter_directory": "/no/such"}, {"tls_certificate": __file__, "tls_key": __file__},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_their_name(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings).check_files()


@pytest.mark.parametrize("host", ["no.such.invalid", "no..host", "h" * 64])
def test_a_host_that_is_not_known_is_named(host):
    with pytest.raises(OSError, match=f"^{re.escape(host)}:80: "):
        bound_socket(host, 80)


def test_the_server_listens_on_this_machine_alone_unless_told_otherwise():
    assert ServerConfig().host == "127.0.0.1"


# -- how much the server takes on ----------------------------------------------------------------------------------


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs = 21: is more than max_logprobs = 20"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 30}, "logprobs = 30: is more"),
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 50}, "top_logprobs = 50"),
        ("/v1/completions", {"prompt": "a", "n": 50, "max_tokens": 4000, "logprobs": 20}, "max_answer_bytes"),
        ("/v1/completions", {"prompt": "a", "n": 129, "max_tokens": 1}, "n = 129: is more than max_completions"),
        ("/v1/completions", {"prompt": "a", "best_of": 500, "max_tokens": 1}, "best_of = 500: is more than"),
        ("/v1/completions", {"prompt": "a", "stop": [f"zzq{i}" for i in range(2000)]}, "stop ="),
        ("/v1/completions", {"prompt": "a", "stop": "z" * 70_000}, "Give at most 1024, of 65536 characters in all"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["z" * 70_000]}, "bad_words ="),
        ("/v1/completions", {"prompt": [[1]] * 2049}, "prompt: has 2049 entries, more than max_prompts = 2048"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input: has 2049 entries, more than max_prompts = 2048"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2: has 2049 entries, more than max_prompts"),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}] * 2049}, "documents: has 2049 entries"),
        ("/tokenize", {"messages": [{}] * 140_000}, "body: has 140003 objects, lists and fields, more than 131072"),
        ("/tokenize", {str(i): 1 for i in range(140_000)}, "body: has 140001 objects, lists and fields"),
        (
            "/v1/completions",
            {"prompt": ["a" * 500] * 300, "echo": True, "logprobs": 20, "max_tokens": 1},
            "max_answer_b",
        ),
    ],
)
def test_what_would_take_much_memory_or_time_is_refused_before_it_begins(talker, path, body, words):
    with serving(talker, engine={"max_logprobs": 20}, max_answer_bytes=1 << 30) as running:
        response = running.post(path, body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert running.post("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 2}).status_code == 200


SIGNS = st.text('{}[]:,"\\ ')


@given(st.recursive(SIGNS | st.none(), lambda inner: st.lists(inner) | st.dictionaries(SIGNS, inner)))
def test_the_parts_of_a_body_are_counted_before_it_is_read_whatever_its_texts_have(value):
    def parts(one):
        inside = [*one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
        fields = len(one) if isinstance(one, dict) else 0
        return isinstance(one, dict | list) + fields + sum(map(parts, inside))

    def strings(one):
        inside = [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
        return isinstance(one, str) + sum(map(strings, inside))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply, "MAX_PARTS", -1)
        assert reply.counted_parts(json.dumps(value).encode()) == (parts(value), strings(value))


def test_a_long_text_with_many_braces_is_no_body_of_many_parts():
    assert reply.decoded(json.dumps({"prompt": '{"a": [1]}' * 100_000}))["prompt"][:2] == '{"'


def test_a_text_is_tokenized_only_if_its_tokens_may_be_few_enough(talker):
    with serving(talker, engine={"max_model_len": 64}, max_prompt_tokens=1000) as running:
        for path, more in (("/v1/completions", {"truncate_prompt_tokens": 5}), ("/tokenize", {})):
            assert running.post(path, {"prompt": "a" * 900, **more}).status_code == 200
            response = running.post(path, {"prompt": "a" * 300_000, **more})
            assert response.status_code == 400
            assert "its 300000 characters are at least" in response.json()["error"]["message"]


def test_large_answers_in_progress_share_the_memory_for_them():
    admission = Admission(10, 1000, max_answer_bytes=1 << 30)
    first, second = admission.enter(1), admission.enter(1)
    first.add_bytes(600 << 20)
    second.add_bytes(60 << 20)  # small: not counted
    with pytest.raises(HttpError, match="answers in progress may take 629145600 bytes") as full:
        second.add_bytes(500 << 20)
    assert full.value.status == 429
    first.end()
    second.add_bytes(500 << 20)
    second.end()
    assert admission.num_answer_bytes == 0


def test_a_server_gives_20_log_probabilities_unless_it_is_told_otherwise():
    assert ENGINE_DEFAULTS["max_logprobs"] == 20


def test_beyond_the_limit_of_requests_the_answer_is_429_with_a_time_to_come_back(talker):
    with serving(talker, max_requests=2) as running:
        with running.held():
            answers = [running.later("/v1/completions", {"prompt": "a", "max_tokens": 2}) for _ in range(2)]
            running.wait_until(lambda: running.context.admission.num_requests == 2)
            response = running.post("/v1/completions", {"prompt": "a"})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert running.get("/health").status_code == 200
        for answer in answers:
            answer.result(60)
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert (
            'vllm:admission_rejections_total{model_name="talker",reason="requests"} 1.0' in running.get("/metrics").text
        )
        running.check_nothing_is_left()


def test_beyond_the_limit_of_prompt_tokens_too_and_a_large_request_is_served_alone(talker):
    with serving(talker, max_prompt_tokens=10) as running:
        with running.held():
            answer = running.later("/v1/completions", {"prompt": "a" * 20, "max_tokens": 2})
            running.wait_until(lambda: running.context.admission.num_prompt_tokens == 20)
            assert running.post("/v1/completions", {"prompt": "a" * 5}).status_code == 429
        answer.result(60)
        running.check_nothing_is_left()


def test_a_request_ends_at_its_deadline_and_leaves_the_engine(talker):
    with serving(talker, timeout=20.0) as running:
        with running.held():
            for options in ({"json": {"timeout": 0.2}}, {"json": {}, "headers": {"X-Request-Timeout": "0.2"}}):
                body = {"prompt": "a", "max_tokens": 2, **options["json"]}
                response = running.post("/v1/completions", body, headers=options.get("headers"))
                assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
            with running.client() as client:
                text = client.post("/v1/completions", json={"prompt": "a", "timeout": 0.2, "stream": True}).text
            assert json.loads(text.strip().removeprefix("data: "))["error"]["code"] == "timeout"
        running.check_nothing_is_left()


def test_silence_is_filled_with_comments_while_a_prompt_is_computed(talker):
    with serving(talker, keep_alive=0.05) as running:
        with running.held(), running.client() as client:
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines) == ": keep-alive"
        time.sleep(0)
        running.check_nothing_is_left()


HARD = b"1.7976931348623157e308"  # msgspec takes 14 microseconds for it


def test_numbers_that_take_long_are_read_one_by_one_so_that_others_run_between(monkeypatch):
    read = []
    monkeypatch.setattr(reply, "isfinite", lambda value: read.append(value) or True)
    assert reply.decoded(b"[" + b",".join([HARD] * 3) + b"]") == read == [1.7976931348623157e308] * 3
    monkeypatch.undo()
    with pytest.raises(HttpError, match="out of range"):
        reply.decoded(b'{"temperature": 1e400}')


def test_integers_of_many_digits_are_refused_while_a_server_runs():
    with short_integers():
        assert reply.decoded(b"9" * MOST_DIGITS) == 10**MOST_DIGITS - 1
        with pytest.raises(HttpError, match="out of range"):
            reply.decoded(b"9" * (MOST_DIGITS + 1))
    assert reply.decoded(b"9" * 4000) == 10**4000 - 1


def test_bodies_of_many_strings_are_refused_before_they_are_made():
    many = json.dumps({"stop": ["a"] * (reply.MAX_STRINGS + 1)}).encode()
    with pytest.raises(HttpError, match="strings, more than"):
        reply.decoded(many)


def test_large_bodies_in_progress_are_counted_and_small_ones_are_not():
    bodies = Bodies(3 * LARGE)
    first, second, small = HeldBody(bodies), HeldBody(bodies), HeldBody(bodies)
    first.grow(LARGE)
    first.grow(2 * LARGE)
    small.grow(LARGE - 1)
    assert bodies.num_bytes == 2 * LARGE
    with pytest.raises(HttpError, match=f"max_total_body_bytes = {bodies.most}") as refused:
        second.grow(LARGE + 1)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    second.grow(LARGE)
    first.end()
    second.grow(9 * LARGE)  # alone
    second.end()
    assert bodies.num_bytes == 0


def test_a_large_body_beside_others_gets_429_and_room_when_they_end(talker):
    size = 200_000
    body = {"prompt": "a", "max_tokens": 1, "user": "a" * size}
    with serving(talker, max_total_body_bytes=size + 50_000) as server:
        slow = socket.create_connection(tuple(server.url.removeprefix("http://").split(":")))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
        slow.sendall(head + b"a" * (size - 1))
        server.wait_until(lambda: server.post("/v1/completions", body).status_code == 429)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        slow.close()
        server.wait_until(lambda: server.post("/v1/completions", body).status_code == 200)
