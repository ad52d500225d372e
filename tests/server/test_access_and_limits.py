"""Keys, limits of requests, and errors of routes."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from server_rig import HI, serving
from starlette.routing import Mount

from foreword.errors import ConfigError
from foreword.server.access import Hosts
from foreword.server.admission import Admission
from foreword.server.app import make_app
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.server.errors import HttpError
from foreword.server.operations import OPERATIONS
from foreword.server.run import bound_socket

PUBLIC = {"/", "/health", "/ready"}
ADMIN = {"/abort", "/requests", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Written here again, so that no operation becomes open by an edit of its declaration alone."""


@pytest.fixture(scope="module")
def guarded(talker):
    limits = {"max_body_bytes": 2000, "max_header_bytes": 1000, "receive_timeout": 0.3}
    with serving(talker, api_key=("one", "two"), admin_key="root", cors_origin=("https://a.b",), **limits) as running:
        yield running


def test_every_route_but_health_needs_a_key(guarded):
    assert {operation.path for operation in OPERATIONS} >= PUBLIC
    for operation in OPERATIONS:
        path = operation.path.replace("{name:path}", "talker").replace("{id}", "x")
        with guarded.client() as client:
            status = client.request(operation.method, path, json={}).status_code
            headers = {"Authorization": "Bearer on"}
            wrong = client.request(operation.method, path, json={}, headers=headers).status_code
        assert (status == 401 and wrong == 401) == (path not in PUBLIC), path
    with guarded.client() as client:
        assert client.get("/nowhere").status_code == 401


def test_any_of_the_keys_fits_in_the_header_of_either_client(guarded):
    for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "one"}, {"authorization": "bearer root"}):
        assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", sorted(ADMIN))
def test_what_changes_the_server_needs_the_admin_key(guarded, path):
    assert {operation.path for operation in OPERATIONS if operation.access == "admin"} == ADMIN
    with guarded.client() as client:
        method = "GET" if path == "/requests" else "POST"
        ordinary = client.request(method, path, json={}, headers={"Authorization": "Bearer one"})
        admin = client.request(method, path, json={}, headers={"Authorization": "Bearer root"})
    assert ordinary.status_code == 401
    assert "admin" in ordinary.json()["error"]["message"]
    assert admin.status_code in (200, 400)


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


def test_bodies_beyond_the_limit_are_refused_before_they_are_read(guarded):
    for options in ({"content": b" " * 2001}, {"content": iter([b" " * 1500] * 2)}):
        with guarded.client() as client:
            response = client.post("/v1/completions", headers={**KEY, "Content-Type": "application/json"}, **options)
        assert response.status_code == 413
        assert "max_body_bytes" in response.json()["error"]["message"]


def test_what_is_not_json_is_refused(guarded):
    headers = {**KEY, "Content-Type": "application/json"}
    with guarded.client() as client:
        for content in (b"{", b"[1]", b"\xff", b"[" * 1000):
            response = client.post("/v1/completions", headers=headers, content=content)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
        plain = client.post("/v1/completions", headers={**KEY, "Content-Type": "text/plain"}, content=b"{}")
    assert plain.status_code == 415


def test_a_page_of_another_origin_may_call_only_if_it_is_allowed(guarded, talker):
    asks = {"Origin": "https://a.b", "Access-Control-Request-Method": "POST"}
    with guarded.client() as client:
        assert client.options("/v1/completions", headers=asks).headers["access-control-allow-origin"]
        other = client.options("/v1/completions", headers={**asks, "Origin": "https://c.d"})
    assert "access-control-allow-origin" not in other.headers
    with serving(talker) as running, running.client() as client:
        closed = client.options("/v1/completions", headers=asks)
    assert "access-control-allow-origin" not in closed.headers


def raw(server, sent: bytes) -> bytes:
    """What the server answers before it closes the connection."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(sent)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_half_open_connections_and_heads_without_an_end_are_closed(guarded):
    assert raw(guarded, b"").startswith(b"HTTP/1.1 408")
    assert raw(guarded, b"GET /health HTTP/1.1\r\nHost: a\r\n").startswith(b"HTTP/1.1 408")
    assert raw(guarded, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1100).startswith(b"HTTP/1.1 431")
    whole = b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1100 + b"\r\n\r\n"
    assert raw(guarded, whole).startswith(b"HTTP/1.1 431")
    body = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\nContent-Type: application/json\r\n"
    )
    assert raw(guarded, body + b"Content-Length: 50\r\n\r\n{").startswith(b"HTTP/1.1 408")


STREAM = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\nContent-Type: application/json\r\n"


def raw_until_closed(server, parts) -> tuple[bytes, int]:
    """Send the parts until the server closes the connection. Return what it answered, and the bytes that were sent."""
    place = urlsplit(server.url)
    answer, sent = [], 0
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        reader = threading.Thread(target=read_all, args=(connection, answer))
        reader.start()
        try:
            for part in parts:
                connection.sendall(part)
                sent += len(part)
        except OSError:
            pass
        else:
            connection.shutdown(socket.SHUT_WR)
        reader.join()
    return b"".join(answer), sent


def read_all(connection, answer: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            answer.append(part)


FIELDS = b"X: a\r\n" * 1000
ENDLESS = {
    "a-second-head": [
        POST,
        b"Content-Length: %d\r\n\r\n" % len(STREAM),
        STREAM,
        b"GET / HTTP/1.1\r\n",
        *[FIELDS] * 9000,
    ],
    "trailers": [POST, b"Transfer-Encoding: chunked\r\n\r\n", b"0\r\n", *[FIELDS] * 9000],
    "one-trailer": [POST, b"Transfer-Encoding: chunked\r\n\r\n", b"0\r\nX: ", *[b"a" * 6000] * 9000],
    "an-extension-of-a-chunk": [POST, b"Transfer-Encoding: chunked\r\n\r\n", b"1;a=", *[b"a" * 6000] * 9000],
    "requests": [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 100] * 9000,
}


@pytest.mark.parametrize("parts", ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_closes_the_connection(guarded, parts):
    before = time.monotonic()
    _, sent = raw_until_closed(guarded, parts)
    assert sent < sum(map(len, parts))
    assert time.monotonic() - before < 20
    assert guarded.get("/health").status_code == 200


def test_trailers_are_no_headers(guarded):
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = POST.replace(b"Content-Type: application/json\r\n", b"")
    chunks = b"%x\r\n%s\r\n0\r\nContent-Type: application/json\r\n\r\n" % (len(body), body)
    answer, _ = raw_until_closed(guarded, [head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks])
    assert answer.startswith(b"HTTP/1.1 415")


def test_a_few_requests_before_the_answers_are_answered_in_order(guarded):
    paths = (b"/health", b"/v1/nothing", b"/health", b"/v1/models")
    ask = b"GET %s HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\n%s\r\n"
    sent = b"".join(ask % (path, b"Connection: close\r\n" if path == paths[-1] else b"") for path in paths)
    assert re.findall(rb"HTTP/1.1 (\d+)", raw(guarded, sent)) == [b"200", b"404", b"200", b"200"]


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


def test_the_name_in_the_host_header_is_checked_on_every_route(talker):
    with serving(talker) as running, running.client() as client:
        for operation in OPERATIONS:
            path = operation.path.replace("{name:path}", "talker").replace("{id}", "x")
            assert client.request(operation.method, path, headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/health").status_code == 200


def test_half_open_connections_delay_no_other(guarded):
    place = urlsplit(guarded.url)
    idle = [socket.create_connection((place.hostname, place.port)) for _ in range(200)]
    try:
        assert guarded.get("/health").status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_an_unknown_route_or_method_is_told_as_clients_expect(guarded):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        with guarded.client() as client:
            response = client.request(method, path, headers=KEY)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_another_model_is_not_found(guarded):
    response = guarded.post("/v1/completions", {"prompt": "a", "model": "gpt"}, headers=KEY)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    body = guarded.post("/v1/completions", {"prompt": "a", "model": "other", "max_tokens": 1}, headers=KEY).json()
    assert body["model"] == "other"


def test_the_id_of_a_request_is_the_clients_if_it_is_plain(guarded):
    assert guarded.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(guarded.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"]) == 32


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


def test_a_host_that_is_not_known_is_named():
    with pytest.raises(OSError, match=r"no\.such\.invalid:80: "):
        bound_socket("no.such.invalid", 80)


def test_the_server_listens_on_this_machine_alone_unless_told_otherwise():
    assert ServerConfig().host == "127.0.0.1"


# -- how much the server takes on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs = 21: is more than max_logprobs = 20"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 30}, "logprobs = 30: is more"),
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 50}, "logprobs = 50"),
        ("/v1/completions", {"prompt": "a", "n": 50, "max_tokens": 4000, "logprobs": 20}, "max_answer_bytes"),
        ("/v1/completions", {"prompt": "a", "n": 16384, "max_tokens": 4000}, "max_answer_bytes"),
        (
            "/v1/completions",
            {"prompt": ["a" * 500] * 300, "echo": True, "logprobs": 20, "max_tokens": 1},
            "max_answer_b",
        ),
    ],
)
def test_an_answer_that_would_take_much_memory_is_refused_before_it_begins(talker, path, body, words):
    with serving(talker, engine={"max_logprobs": 20}, max_answer_bytes=1 << 30) as running:
        response = running.post(path, body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert running.post("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 2}).status_code == 200


def test_large_answers_in_progress_share_the_memory_for_them():
    admission = Admission(10, 1000, max_answer_bytes=1 << 30)
    first, second = admission.enter(1), admission.enter(1)
    first.add_bytes(600 << 20)
    second.add_bytes(60 << 20)  # small: not counted
    with pytest.raises(HttpError, match="answers in progress may take 629145600 bytes") as full:
        second.add_bytes(500 << 20)
    assert full.value.status == 429
    first.leave()
    second.add_bytes(500 << 20)
    second.leave()
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
