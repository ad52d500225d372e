"""The front end over replicas that are functions: which of them answer an operation, and how their answers are one."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.responses import PlainTextResponse

from foreword.cluster.front import Front
from foreword.server.config import ServerConfig
from foreword.server.inspect_routes import FOLLOW_SECONDS
from foreword.server.operations import OPERATIONS

ALL = {"/requests", "/requests/{id}/why", "/abort", "/reset_prefix_cache", "/metrics", "/kv_event_sources",
       "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # fmt: skip
ITSELF = {"/health", "/ready", "/inspect"}
OF_ONE_ENGINE = {"/inspect/steps", "/inspect/steps/{epoch}/{part}", "/slots", "/slots/{id}"}
"""A front end, which has several engines, wants the name of one, or refuses them."""
REFUSED = {"/api/pull", "/api/delete"}
"""A front end, whose replicas serve one model, refuses them."""
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass
class Known(Front):
    """known: status and value of each replica; metrics count as a call."""

    known: list[tuple[int, dict]] = field(default_factory=lambda: [(200, {"data": [], "reset": True})] * 2)
    calls: list[tuple[str, str, object]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    kept: dict[str, dict] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        super().__init__()

    async def call_all(self, method, path, body=None, *, seconds=2.0):
        self.calls.append((method, path, body))
        self.limits[path] = seconds
        return [(str(i), *answer) for i, answer in enumerate(self.known)]

    async def pages(self):
        self.calls.append(("GET", "/metrics", None))
        return [(str(i), "# TYPE steps counter\nsteps_total 3\n") for i in range(len(self.known))]

    async def pass_on(self, scope, body, send):
        self.passed.append(scope["path"])
        await PlainTextResponse("passed on")(scope, None, send)

    async def fetch_of(self, name, path, *, seconds=2.0):
        self.limits[path] = seconds
        status, answer = self.known[int(name)]
        return None if status == 503 else (status, json.dumps(answer).encode())

    async def states(self):
        return [{"replica": i, "ready": True} for i in range(len(self.known))]

    async def adapters(self):
        return self.kept

    async def keep_adapter(self, name, body):
        self.kept.pop(name, None)
        if body is not None:
            self.kept[name] = body

    def ask(self, method, path, **options) -> httpx.Response:
        async def request():
            transport = httpx.ASGITransport(self.behind_gate(ServerConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **options)

        return asyncio.run(request())

    def post(self, path, body) -> tuple[int, dict]:
        response = self.ask("POST", path, json=body)
        return response.status_code, response.json()


@pytest.mark.parametrize("operation", list(OPERATIONS), ids=lambda operation: operation.path)
def test_an_operation_is_asked_of_all_replicas_or_passed_on_to_one(operation):
    front = Known()
    path = operation.path.replace("{name:path}", "name").replace("{id}", "x")
    body = {} if operation.method == "GET" else {"json": {"lora_name": "x"}}
    refused = 403 if operation.path == "/slots" else 400  # else the body, or the replica that is not named
    is_refused = operation.path in OF_ONE_ENGINE | REFUSED
    assert front.ask(operation.method, path, **body).status_code == (refused if is_refused else 200)
    assert len({path for _, path, _ in front.calls}) == (operation.path in ALL)
    assert front.passed == ([] if operation.path in ALL | ITSELF | OF_ONE_ENGINE | REFUSED else [path])


def test_a_query_names_the_replica_whose_steps_are_wanted():
    front = Known([(200, {"steps": "of 0"}), (404, {"error": "of 1"}), (503, {})])
    for name, (status, answer) in enumerate(front.known[:2]):
        response = front.ask("GET", f"/inspect/steps?replica={name}")
        assert (response.status_code, response.json()) == (status, answer)
    assert front.ask("GET", "/inspect/steps/1/s0?replica=0").json() == {"steps": "of 0"}
    assert set(front.limits.values()) == {FOLLOW_SECONDS}
    for query, status in (
        ("", 400),
        ("?replica=", 404),
        ("?replica=3", 404),
        ("?replica=-1", 404),
        ("?replica=2", 404),
    ):
        response = front.ask("GET", f"/inspect/steps{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (status, "replica")
        assert response.json()["error"]["message"].endswith("ready are 0, 1, 2")
    assert Known([]).ask("GET", "/inspect/steps?replica=0").status_code == 503


def test_lists_name_the_replica_of_each_item():
    front = Known([(200, {"data": [{"id": "a"}]}), (200, {"data": [{"id": "b"}]}), (503, {"error": {}})])
    found = [{"id": "a", "replica": "0"}, {"id": "b", "replica": "1"}]
    assert front.ask("GET", "/requests").json() == {"object": "list", "data": found}
    assert front.ask("GET", "/kv_event_sources").json() == {"object": "list", "data": found}


def test_the_replica_that_has_a_request_answers_about_it():
    front = Known([(404, {"error": {}}), (200, {"id": "a/b"})])
    response = front.ask("GET", "/requests/x/why")
    assert (response.status_code, response.json()) == (200, {"id": "a/b"})
    assert front.post("/abort", {"request_id": "x"}) == (200, {"id": "a/b"})
    assert front.calls[-1] == ("POST", "/abort", {"request_id": "x"})
    front.known = [(404, {"error": {"code": "none"}})] * 2
    assert front.post("/abort", {"request_id": "x"}) == (404, {"error": {"code": "none"}})


def test_caches_are_reset_if_all_are():
    assert Known([(200, {"reset": True})] * 2).post("/reset_prefix_cache", {}) == (200, {"reset": True})
    mixed = Known([(200, {"reset": True}), (200, {"reset": False})])
    assert mixed.post("/reset_prefix_cache", {}) == (200, {"reset": False})
    refusing = Known([(200, {"reset": True}), (400, {"error": {}})])
    assert refusing.post("/reset_prefix_cache", {"x": 1}) == (400, {"error": {}})


def test_an_adapter_is_loaded_on_all_replicas_or_on_none():
    body = {"lora_name": "law", "lora_path": "law"}
    front = Known([(200, {"loaded": True})] * 2)
    assert front.post(LOAD, body) == (200, {"loaded": True})
    assert front.kept == {"law": {**body, "load_inplace": True}}
    failing = Known([(200, {"loaded": True}), (400, {"error": {"message": "no rank"}})])
    assert failing.post(LOAD, body) == (400, {"error": {"message": "replica 1: no rank"}})
    assert failing.calls[-1] == ("POST", UNLOAD, {"lora_name": "law"})
    assert failing.kept == {}
    assert front.post(UNLOAD, {"lora_name": "law"})[0] == 200
    assert front.kept == {}


@pytest.mark.parametrize("path", ["/abort", "/reset_prefix_cache", LOAD, UNLOAD])
def test_a_body_that_a_page_of_another_origin_may_send_reaches_no_replica(path):
    front = Known()
    response = front.ask("POST", path, content=b'{"request_id": "x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert front.calls == []


def test_unknown_paths_and_methods_are_refused_without_a_replica():
    front = Known([])
    assert front.ask("GET", "/nowhere").status_code == 404
    response = front.ask("DELETE", "/abort")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert front.ask("POST", "/health", json={}).headers["allow"] == "GET, HEAD"
    assert (front.calls, front.passed) == ([], [])


def test_without_a_ready_replica_the_status_is_503():
    front = Known([])
    for method, path in (("GET", "/ready"), ("GET", "/requests"), ("POST", "/abort")):
        response = front.ask(method, path, json={"request_id": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert front.ask("GET", "/health").status_code == 200


def test_each_operation_says_how_long_a_replica_may_take_for_it():
    front = Known()
    for path, body in (
        ("/abort", {"request_id": "a"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    ):
        front.ask("POST", path, json=body)
    assert front.limits == {"/abort": 2.0, "/v1/load_lora_adapter": 300.0}
