"""The answers of a server on the wire, whether it is one process or a front end of two replicas."""

import json
import random
import re
import socket
import threading
import time
from itertools import product

import attack
import pytest
from processes import PATIENCE
from wire_rig import MAX_BODY, MAX_HEAD, OWN, RECEIVE_SECONDS, Answer, Wire, head, parsed, wires

from foreword.server.operations import OPERATIONS
from fuzz.mutations import mutate_json
from fuzz.targets import operation_body

OF_ONE_ENGINE = {"/inspect/steps", "/inspect/steps/{epoch}/{part}", "/slots", "/slots/x"}
"""A front end, which has several engines, wants the name of one, or refuses them."""
REFUSED = {"/api/pull", "/api/delete"}
"""A front end, whose replicas serve one model, refuses them."""
PUBLIC = {"/", "/health", "/ready", "/inspect"}
ADMIN = {
    "/abort",
    "/requests",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    *OF_ONE_ENGINE,
    *REFUSED,
}
"""Written here again, so that no operation becomes open by an edit of its declaration alone."""
DIFFERS = {"/ready", "/metrics", "/api/ps", *OF_ONE_ENGINE, *REFUSED}
"""A front end answers them with the states of its replicas, and /api/ps has a time."""
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
KEYS = (None, "wrong", "one", "root")
PATHS: dict[str, list[str]] = {}
"""The methods of each path, as they are declared."""
for one in OPERATIONS:
    PATHS.setdefault(one.path.replace("{name:path}", "tiny").replace("{id}", "x"), []).append(one.method)
UNSERVED = ("/classify", "/infill", "/api/pull")  # by the model of these tests, or a front end
POSTS = [one.path for one in OPERATIONS if one.method == "POST" and one.path not in UNSERVED]
FORMS = [one.path for one in OPERATIONS if one.body is not None and one.body.form is not None]
NOWHERE = ("/nowhere", "/v1", "/v1/", "/v1/messages/x", "/v1/messages2", "/health/", "/requests/x", "/requests/a/b/why")

COMPLETION = b'{"prompt": "a", "max_tokens": 1, "temperature": 0}'
FIELDS = ("Authorization: Bearer one", "Content-Type: application/json")


@pytest.fixture(scope="module")
def servers(talker):
    with wires(talker) as found:
        yield found


@pytest.fixture(params=["one", "replicas"])
def server(request, servers) -> Wire:
    return servers[request.param]


def both(servers: dict[str, Wire], *arguments, **options) -> Answer:
    """Return the answer of each server, which is equal, and is not a failure of the server."""
    one, other = (server.ask(*arguments, **options) for server in servers.values())
    assert one.lasting == other.lasting, (arguments, options)
    assert one.status < 500, (arguments, options, one.body)
    return one


def check_error(path: str, answer: Answer) -> None:
    """An error has the form of the interface that its path belongs to."""
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.body) == int(answer.headers["content-length"])
    body = answer.json
    if path.startswith("/v1/messages") and path != "/v1/messages2":
        assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    elif path.startswith("/api/"):
        assert (set(body), type(body["error"])) == ({"error"}, str)
        return
    else:
        assert (set(body), set(body["error"])) == ({"error"}, {"message", "type", "param", "code"})
    assert body["error"]["message"]


# -- paths, methods and keys -------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("key", KEYS)
def test_each_path_and_method_has_the_status_of_its_operation_and_key(servers, key):
    for path, method in product((*PATHS, *NOWHERE), METHODS):
        ask = servers["one"].ask if path in DIFFERS else lambda *given, **options: both(servers, *given, **options)
        answer = ask(method, path, b"{}" if method in ("POST", "DELETE") else None, key=key)
        needed = {None: 0, "wrong": 0, "one": 1, "root": 2}[key]
        if needed < (0 if path in PUBLIC else 2 if path in ADMIN else 1):
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            assert method == "HEAD" or (b"admin key" in answer.body) == (path in ADMIN)
        elif path in NOWHERE:
            assert answer.status == 404, (method, path)
            assert method == "HEAD" or f"{method} {path}" in str(answer.json["error"]["message"])
        elif ("GET" if method == "HEAD" else method) in PATHS[path]:
            assert answer.status not in (401, 405), (method, path)
        else:
            allowed = ", ".join(PATHS[path]).replace("GET", "GET, HEAD")
            assert (answer.status, answer.headers["allow"]) == (405, allowed), (method, path)
        if method == "HEAD":
            assert answer.body == b""
        elif answer.status >= 400:
            check_error(path, answer)


@pytest.mark.parametrize("path", sorted(DIFFERS - OF_ONE_ENGINE - REFUSED))
def test_what_differs_between_servers_has_the_same_status_and_headers(servers, path):
    for method in ("GET", "HEAD"):
        one, other = (server.ask(method, path) for server in servers.values())
        assert (one.lasting[:2], one.status, bool(one.body)) == (other.lasting[:2], 200, method == "GET")


def test_the_steps_of_each_replica_are_shown(servers):
    """Each has its own, and the one server has no replica to name."""
    assert servers["replicas"].ask("POST", "/v1/completions", COMPLETION).status == 200
    for number in (0, 1):
        path = f"/inspect/steps?replica={number}"
        index = servers["replicas"].ask("GET", path)
        assert (index.status, index.json["token_ids"]) == (200, "omitted")
        assert servers["replicas"].ask("GET", path, key="one").status == 401
        assert servers["one"].ask("GET", path).status == 400


def test_a_head_has_the_status_and_headers_of_a_get(servers):
    for path in (path for path, methods in PATHS.items() if "GET" in methods and path not in DIFFERS):
        get, of_head = both(servers, "GET", path), both(servers, "HEAD", path)
        assert (of_head.lasting[:2], of_head.body) == (get.lasting[:2], b""), path


SPELLINGS = ("//requests", "/requests/", "/requests/.", "/./requests", "/x/../requests", "/requests%2f", "/requests;x",
             "/REQUESTS", "/requests%00", "/requests%20", "/requests\\", "*", "/health/../requests", "/requests%3Fx",
             "/health%2f..%2frequests", "/requests/%2e%2e/requests", "/requests/1/why?/requests", "/health?/requests",
             "http://localhost//requests", "http://localhost", "http://localhost?/requests", "?requests", "requests",
             "localhost:80", "/requests\tx", "/requests\xff")  # fmt: skip
SAME = ("/requests", "/%72equests", "/requests?x", "/requests#x", "http://localhost/requests", "http://x/requests?y")


def test_no_spelling_of_a_path_leads_to_an_admins_operation_without_the_admin_key(servers):
    for target, method, key in product((*SPELLINGS, *SAME), ("GET", "HEAD", "POST", "OPTIONS"), ("one", "root")):
        answer = both(servers, method, target, b"{}" if method == "POST" else None, key=key)
        is_list = method in ("GET", "HEAD") and target in SAME and key == "root"
        assert (answer.status == 200 and b"chat" not in answer.body and "health" not in target) == is_list, target
        assert (b'"data"' in answer.body) == (is_list and method == "GET"), target


def test_a_host_header_that_looks_like_a_path_changes_no_path(servers):
    for host in ("localhost/requests?", "x/requests?", "127.0.0.1:1/requests?", "127.0.0.1/requests#"):
        answer = both(servers, "GET", "/requests/1/why", key="one", host=host)
        assert (answer.status, b'"data"' in answer.body) == (421, False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", sorted(PATHS))
def test_another_name_of_the_server_is_refused_and_an_allowed_one_is_not(servers, path):
    for host in ("evil.example", "localhost\xff", "[::1", "@localhost", "localhost,evil", "localhost:x", "a b"):
        assert both(servers, "GET", path, host=host).status == 421
    for host in ("models.example:80", "LOCALHOST:1", "[::1]", "192.0.2.7", ""):
        if path not in DIFFERS:
            assert both(servers, "GET", path, host=host).status != 421


def test_a_key_is_read_in_the_header_of_either_client(servers):
    for line, is_right in (
        ("Authorization: Bearer two", True),
        ("authorization: bearer root", True),
        ("x-api-key: one", True),
        ("x-api-key: wrong", False),
        ("Authorization: Basic b25lOg==", False),
        ("Authorization: one", False),
        ("Authorization: Bearer", False),
        ("Authorization: Bearer on", False),
        ("Authorization: Bearer one two", False),
        ("Authorization: Bearer \xff", False),
    ):
        assert both(servers, "GET", "/v1/models", None, line, key=None).status == (200 if is_right else 401), line


def test_of_keys_in_both_headers_the_bearer_is_the_one_that_counts(servers):
    assert both(servers, "GET", "/requests", None, "x-api-key: root", key="one").status == 401
    assert both(servers, "GET", "/requests", None, "x-api-key: wrong", key="root").status == 200
    assert both(servers, "POST", "/tokenize", b"{}", "x-api-key: one", key="wrong").status == 401


@pytest.mark.parametrize(
    "name", ["Host", "Authorization", "X-API-Key", "Content-Type", "Origin", "Expect", "X-Request-Id"]
)
def test_a_header_that_counts_is_refused_if_it_is_given_twice(servers, name):
    answer = both(servers, "POST", "/tokenize", b"{}", f"{name}: root", f"{name}: root", kind=None, key=None)
    assert (answer.status, f"{name.lower()} is given twice" in answer.json["error"]["message"]) == (400, True)


IDS = ("a%20b", "%00", "a%00b", "%C3%A9", "\xc3\xa9", "%ff", "a%2541", "%2e%2e", "..", ".", "a" * 3000, "a%252Fb",
       "%7F", "%ed%a0%80", "a;b", "a%3Fb", "a%23b", "%", "%zz", "%0d%0aX:1", "a|b", "{id}", "%25", "+", "a%2fb",
       "")  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_an_id_that_nobody_has_is_not_found_however_it_is_written(servers, name):
    for method, path in product(("GET", "HEAD"), ("/requests/{}/why", "/v1/models/{}")):
        assert both(servers, method, path.format(name)).status in ((400,) if name == "\xc3\xa9" else (404,))
    if name == "a%2541":
        message = both(servers, "GET", f"/requests/{name}/why").json["error"]["message"]
        assert "'a%41'" in message


# -- bodies ------------------------------------------------------------------------------------------------------------

BODIES = {
    "open": b"{", "list": b"[1]", "null": b"null", "text": b'"a"', "space": b" " * 1000, "nul": b"\0", "nan": b"NaN",
    "bom": b"\xef\xbb\xbf{}", "bom-completion": b"\xef\xbb\xbf" + COMPLETION,
    "utf16": COMPLETION.decode().encode("utf-16"), "utf32": COMPLETION.decode().encode("utf-32-le"),
    "not-utf8": b"\xff\xfe", "not-utf8-key": b'{"\xff": 1}',
    "not-utf8-value": b'{"prompt": "\xff"}', "overlong": b'{"prompt": "\xc0\x80"}', "cut": b'{"prompt": "\xe2\x82',
    "surrogate": b'{"request_id": "\\ud800", "lora_name": "\\ud800"}', "surrogate-utf8": b'{"a": "\xed\xa0\x80"}',
    "nested-lists": b"[" * 90_000, "nested-objects": b'{"a":' * 30_000,
    "nested-field": b'{"a":' + b"[" * 5000 + b"]" * 5000,
    "infinity": b'{"a": 1e999}', "many-digits": b'{"a": ' + b"9" * 5000 + b"}", "two": b"{} {}", "rest": b"{}\0",
    "unknown-field": b'{"\\u0000": 1}', "long-field": b'{"%s": 1}' % (b"x" * 100_000), "comment": b"{} //",
}  # fmt: skip


OBJECTS = [BODIES["unknown-field"], BODIES["long-field"]]


@pytest.mark.one_in(13)
@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-16"])
def test_a_body_that_is_no_request_is_refused_on_every_route(servers, content, kind):
    for path in POSTS:
        answer = both(servers, "POST", path, content, kind=kind)
        assert answer.status == (415 if path in FORMS else 400), path
        if answer.status == 400 and not path.startswith(("/v1/messages", "/api/")) and content not in OBJECTS:
            assert answer.json["error"]["param"] == "body"
        assert len(answer.body) < 2000
        check_error(path, answer)


def test_an_empty_body_is_answered_alike(servers):
    for path, kind in product(POSTS, ("application/json", "text/plain", None)):
        both(servers, "POST", path, b"", kind=kind)
    assert both(servers, "POST", "/reset_prefix_cache", b"", kind=None).status == 200


FOREIGN = "Origin: https://evil.example"
KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json\xff",
         "text/plain; application/json", "multipart/form-data", "", None)  # fmt: skip
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\xff\r\n--x--\r\n'


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_page_of_another_origin_may_send_unasked_is_refused_on_every_route(servers, kind):
    for path, content in product(POSTS, (b"{}", FORM, b"")):
        answer = both(servers, "POST", path, content, FOREIGN, kind=kind)
        assert answer.status == (403 if path in FORMS or not content else 415), path
        check_error(path, answer)


@pytest.mark.parametrize("origin", [OWN, "https://a.b"])
def test_a_form_of_an_own_or_allowed_page_is_read(servers, origin):
    for path in FORMS:
        answer = both(servers, "POST", path, FORM, f"Origin: {origin}", kind="multipart/form-data; boundary=x")
        assert answer.status in (400, 404)
        assert both(servers, "POST", path, b"--y", f"Origin: {origin}", kind=KINDS[2]).status == 400


def test_a_page_of_an_allowed_origin_is_told_so(servers):
    asks = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")
    for path in (*PATHS, "/nowhere"):
        answer = both(servers, "OPTIONS", path, None, "Origin: https://a.b", *asks, key=None)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://a.b")
        for origin in ("https://evil.example", "null", "https://a.b.evil.example"):
            answer = both(servers, "OPTIONS", path, None, f"Origin: {origin}", *asks, key=None)
            assert "access-control-allow-origin" not in answer.headers
    for key, status in (("one", 200), ("wrong", 401)):
        answer = both(servers, "GET", "/v1/models", None, "Origin: https://a.b", key=key)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "https://a.b")
        assert answer.headers["access-control-expose-headers"] == "x-request-id"


def test_a_body_that_is_encoded_otherwise_is_refused(servers):
    for coding in ("gzip", "br", "identity, gzip"):
        answer = both(servers, "POST", "/tokenize", COMPLETION, f"Content-Encoding: {coding}")
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    assert both(servers, "POST", "/tokenize", b'{"prompt": "a"}', "Content-Encoding: identity").status == 200


def test_variables_of_a_chat_template_are_refused_where_they_are_arguments_of_the_program(servers):
    names = ("media", "messages", "self", "tools", "add_generation_prompt", "chat_template", "name", "variables")
    for name, value in product(names, ([1], "a", {}, True, None)):
        variables = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: value}}
        is_free = (name in ("name", "variables") and not value) or (name, value) == ("chat_template", None)
        for path in ("/v1/chat/completions", "/tokenize"):
            body = json.dumps({**variables, **({"max_tokens": 1, "seed": 1} if "chat" in path else {})}).encode()
            answers = [server.ask("POST", path, body) for server in servers.values()]
            assert [answer.status for answer in answers] == [200 if is_free else 400] * 2, (path, name, value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(2))
def test_no_damaged_body_makes_the_server_fail(servers, seed):
    dice = random.Random(seed)
    examples = operation_body.valid()
    for number in range(250):
        if number % 2:
            path, _, body = dice.choice(examples).partition(b"\n")
            path, body = path.decode(), mutate_json(dice, body)[: MAX_BODY - 1]
        else:
            path, value = attack.mutation(dice)
            body = json.dumps(value).encode()
        answers = [server.ask("POST", path, body) for server in servers.values()]
        assert answers[0].status == answers[1].status < 500, (path, body[:500], answers)
    for server in servers.values():
        assert server.ask("GET", "/requests").json["data"] == []


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["X\xff: a", "X: \0", " folded: a", "X : a", "Content-Length: 3", "Content-Length: x", "Content-Length: -1",
     "Transfer-Encoding: gzip", "Transfer-Encoding: chunked", "X\n: a"],
)  # fmt: skip
def test_a_damaged_head_is_refused_and_closes_the_connection(servers, line):
    sent = head("POST", "/tokenize", *FIELDS, "Content-Length: 2", line) + b"{}"
    for server in servers.values():
        (answer,) = parsed(server.raw(sent))
        assert (answer.status, answer.headers["connection"]) == (400, "close")


def test_other_expectations_are_refused(servers):
    assert both(servers, "POST", "/tokenize", COMPLETION, "Expect: a miracle").status == 417


def test_a_body_is_asked_for_after_its_head_was_checked(server):
    expecting = (*FIELDS, "Expect: 100-continue", "Connection: close")
    with server.connection() as connection:
        connection.sendall(head("POST", "/v1/completions", *expecting, f"Content-Length: {len(COMPLETION)}"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(COMPLETION)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert parsed(answer)[0].status == 200
    before = time.monotonic()
    for path, key, length, status in (
        ("/tokenize", "wrong", 9, 401),
        ("/nowhere", "one", 9, 404),
        ("/health", "one", 9, 405),
        ("/tokenize", "one", MAX_BODY + 1, 413),
    ):
        lines = f"Authorization: Bearer {key}", *expecting[1:], f"Content-Length: {length}"
        assert [answer.status for answer in parsed(server.raw(head("POST", path, *lines)))] == [status]
    assert time.monotonic() - before < RECEIVE_SECONDS


def test_a_head_up_to_the_limit_is_served_and_a_longer_one_refused(servers):
    lengths = range(MAX_HEAD - 120, MAX_HEAD)
    statuses = [both(servers, "GET", "/v1/models", None, f"X: {'a' * length}").status for length in lengths]
    assert (statuses, set(statuses)) == (sorted(statuses), {200, 431})
    for length in (MAX_HEAD, 4 * MAX_HEAD, 20 * MAX_HEAD):
        assert both(servers, "GET", "/v1/models", None, f"X: {'a' * length}").status == 431
        assert both(servers, "GET", f"/{'a' * length}").status == 431
        assert both(servers, "GET", "/v1/models", None, *["X: a"] * (length // 4)).status == 431


@pytest.mark.one_in(2)
def test_what_does_not_arrive_in_time_is_refused(server):
    body = head("POST", "/v1/completions", *FIELDS, "Content-Length: 50") + b"{"
    chunked = head("POST", "/v1/completions", *FIELDS, "Transfer-Encoding: chunked") + b"1\r\n{\r\n"
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda data=data: found.append(server.raw(data)))
        for data in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n", body, chunked)
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer[:12] for answer in found] == [b"HTTP/1.1 408"] * 4
    assert time.monotonic() - begin < PATIENCE


UPGRADES = {
    "java": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk"),
    "websocket": ("Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "connection: x, UPGRADE"),
    "several": ("Connection: upgrade", "Upgrade: a", "Upgrade: b, h2c"),
}  # fmt: skip
CLOSING = {name: [f"{line}, close" if "onnection" in line else line for line in UPGRADES[name]] for name in UPGRADES}


@pytest.mark.parametrize("name", UPGRADES)
def test_a_wish_for_another_protocol_is_ignored_and_the_body_read(server, name):
    """RFC 9110, 7.8 allows it. The body is not read as another request, and the requests behind it are answered."""
    body = b'{"prompt": "GET /health HTTP/1.1\\r\\n\\r\\n"}'
    sized = f"Content-Length: {len(body)}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sent = head("POST", "/tokenize", *FIELDS, *UPGRADES[name], sized) + body
    sent += head("POST", "/tokenize", *FIELDS, *UPGRADES[name], "Transfer-Encoding: chunked") + chunks
    sent += head("GET", "/health", *UPGRADES[name]) + head("POST", "/tokenize", *FIELDS, *CLOSING[name], sized) + body
    whole, bytewise = parsed(server.raw(sent)), parsed(server.raw(*(bytes([byte]) for byte in sent)))
    for answers in (whole, bytewise):
        assert [answer.status for answer in answers] == [200] * 4
        assert [answers[i].json["count"] for i in (0, 1, 3)] == [len("GET /health HTTP/1.1\r\n\r\n")] * 3


@pytest.mark.one_in(2)
def test_heads_that_wish_for_another_protocol_have_the_limits_of_others(server):
    for path, status in (("/v1/models", 200), ("/v1/completions", 405), ("/v1/nothing", 404)):
        assert server.ask("GET", path, None, *UPGRADES["several"], kind=None).status == status
    long = head("GET", "/health", *UPGRADES["java"], "X: " + "a" * MAX_HEAD)
    assert [answer.status for answer in parsed(server.raw(long))] == [431]
    _, sent = server.exchange([head("GET", "/health", *UPGRADES["java"]) * 100] * 9000)
    assert sent < 9000 * len(head("GET", "/health", *UPGRADES["java"]) * 100)
    (answer,) = parsed(server.raw(head("POST", "/tokenize", *FIELDS, *UPGRADES["java"], "Content-Length: 9") + b"{"))
    assert answer.status == 408
    assert parsed(server.raw(head("CONNECT", "localhost:80")))[0].status == 400


# -- what a client that still sends can read ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/completions", "one", 413),
        ("/v1/completions", "wrong", 401),
        ("/nowhere", "one", 404),
        ("/health", "one", 405),
    ],
)
def test_a_refusal_can_be_read_after_all_of_a_body_was_sent(server, path, key, status, is_chunked):
    piece = b" " * (1 << 20)
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {8 * len(piece)}"
    lines = f"Authorization: Bearer {key}", "Content-Type: application/json", "Connection: close", length
    pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece] * 8
    (answer,) = parsed(server.raw(head("POST", path, *lines), *pieces, b"0\r\n\r\n" if is_chunked else b""))
    assert (answer.status, b"max_body_bytes" in answer.body) == (status, status == 413)
    check_error(path, answer)


def test_a_refusal_of_a_body_comes_before_the_rest_of_it(server):
    with server.connection() as connection:
        connection.sendall(head("POST", "/tokenize", *FIELDS, f"Content-Length: {MAX_BODY + 1}") + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        assert connection.send(b" " * 1000) == 1000


def test_a_head_that_is_too_long_is_refused_readably(server):
    sent = head("GET", "/health", *["X: " + "a" * 1000] * 200)
    assert parsed(server.raw(sent))[0].status == 431
    broken = head("GET", "/health", "X: \0") + b"a" * 500_000
    assert parsed(server.raw(broken))[0].status == 400


def test_a_body_without_an_end_is_not_read_for_ever(server):
    lines = "Authorization: Bearer one", "Content-Type: application/json", "Transfer-Encoding: chunked"
    piece = b"10000\r\n%s\r\n" % (b" " * 0x10000)
    before = time.monotonic()
    _, sent = server.exchange([head("POST", "/tokenize", *lines), *[piece] * 3000])
    assert sent < 3000 * len(piece)
    assert time.monotonic() - before < PATIENCE


STREAM = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
CHUNKED = head("POST", "/v1/completions", *FIELDS, "Transfer-Encoding: chunked")
MANY = b"X: a\r\n" * 1000
ENDLESS = {
    "a-second-head": [
        head("POST", "/v1/completions", *FIELDS, f"Content-Length: {len(STREAM)}"),
        STREAM,
        b"GET / HTTP/1.1\r\n",
        *[MANY] * 9000,
    ],
    "trailers": [CHUNKED, b"0\r\n", *[MANY] * 9000],
    "one-trailer": [CHUNKED, b"0\r\nX: ", *[b"a" * 6000] * 9000],
    "an-extension-of-a-chunk": [CHUNKED, b"1;a=", *[b"a" * 6000] * 9000],
    "requests": [head("GET", "/health") * 100] * 9000,
}


@pytest.mark.parametrize("parts", ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_closes_the_connection(server, parts):
    before = time.monotonic()
    _, sent = server.exchange(parts)
    assert sent < sum(map(len, parts))
    assert time.monotonic() - before < PATIENCE
    assert server.ask("GET", "/health").status == 200


# -- several requests on a connection ----------------------------------------------------------------------------------


def test_trailers_are_no_headers(server):
    chunks = b"%x;a=b\r\n%s\r\n0\r\nContent-Type: application/json\r\n\r\n" % (len(COMPLETION), COMPLETION)
    bare = "Authorization: Bearer one", "Connection: close", "Transfer-Encoding: chunked"
    assert parsed(server.raw(head("POST", "/v1/completions", *bare) + chunks))[0].status == 415
    whole = head("POST", "/v1/completions", *FIELDS, *bare[1:]) + chunks
    assert parsed(server.raw(whole))[0].status == 200


def test_requests_before_the_answers_are_answered_in_order(server):
    paths = ("/health", "/v1/nothing", "/health", "/v1/models")
    sent = b"".join(
        head("GET", path, FIELDS[0], *(["Connection: close"] if path == paths[-1] else [])) for path in paths
    )
    assert [answer.status for answer in parsed(server.raw(sent))] == [200, 404, 200, 200]


@pytest.mark.one_in(2)
def test_a_connection_is_used_again_after_a_refusal_whose_body_comes_late(server):
    with server.connection() as connection:
        connection.sendall(head("POST", "/tokenize", "Authorization: Bearer wrong", "Content-Length: 4"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.sendall(b"late")
        time.sleep(1.1 * RECEIVE_SECONDS)  # no time is counted between requests
        connection.sendall(head("GET", "/v1/models", FIELDS[0], "Connection: close"))
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", rest) == [b"200"]


def test_a_damaged_request_is_not_answered_in_the_place_of_an_earlier_one(server):
    slow = json.dumps({"prompt": "a", "max_tokens": 300, "ignore_eos": True}).encode()
    sent = head("POST", "/v1/completions", *FIELDS, f"Content-Length: {len(slow)}") + slow
    answer, _ = server.exchange([sent, b"damaged\r\n\r\n"])
    assert answer == b""


def test_older_clients_are_answered(server):
    get = b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer one\r\n%s\r\n"
    for line in (b"", b"Connection: keep-alive\r\n"):
        (answer,) = parsed(server.raw(get % line))
        assert (answer.status, answer.json["object"]) == (200, "list")
    post = b"POST /tokenize HTTP/1.0\r\nAuthorization: Bearer one\r\nContent-Type: application/json\r\n%s\r\n%s"
    body = b'{"prompt": "a"}'
    assert parsed(server.raw(post % (b"Content-Length: %d\r\n" % len(body), body)))[0].json["count"] == 1
    assert parsed(server.raw(post % (b"", b"")))[0].status < 500
    for line in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00"):
        assert parsed(server.raw(line))[0].status == 400


def test_the_id_of_a_request_is_the_clients_if_it_is_plain(server):
    for method, path, key in (("GET", "/health", "one"), ("GET", "/nowhere", "one"), ("POST", "/abort", "wrong")):
        for given, is_kept in (
            ("mine-1", True),
            ("a b", False),
            ("a" * 128, True),
            ("a" * 129, False),
            ("\xff", False),
        ):
            found = server.ask(method, path, b"{}" if method == "POST" else None, f"X-Request-Id: {given}", key=key)
            name = found.headers["x-request-id"]
            assert (name == given) == is_kept
            assert is_kept or len(name) == 32


def test_a_stream_has_one_id_and_ends_as_a_chunked_body(server):
    answer = server.ask("POST", "/v1/completions", STREAM, "X-Request-Id: mine-2")
    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine-2")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_threads_of_grammars_end_with_the_server(server):
    """The fixture asserts the status of the end."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "a+"}}).encode()
    assert server.ask("POST", "/v1/completions", body).json["choices"][0]["text"] == "aa"


@pytest.mark.one_in(2)
def test_half_open_connections_delay_no_other(server):
    idle = []
    try:
        for _ in range(200):
            idle.append(socket.create_connection(("127.0.0.1", server.port)))
        assert server.ask("GET", "/health").status == 200
    finally:
        for connection in idle:
            connection.close()
