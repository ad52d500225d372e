"""`foreword serve --replicas`: one server of several processes, with clients and kills. The long ones: updates.py."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
from replica_rig import LONG, Served, serving
from server_rig import frames_of

from foreword.cluster.cluster import Cluster
from foreword.cluster.prompts import pieces_of
from foreword.errors import ConfigError
from foreword.server.config import ServerConfig


def test_answers_are_those_of_one_server_and_prompts_that_begin_alike_meet(served: Served):
    prompts = [letter * 3000 for letter in "abcd"]
    texts = [served.complete(prompt).json()["choices"][0]["text"] for prompt in prompts]
    assert all(len(text) == 8 for text in texts)
    before = sum(served.metrics("vllm:prefix_cache_hits_total").values())
    assert [served.complete(prompt).json()["choices"][0]["text"] for prompt in prompts] == texts
    hits = sum(served.metrics("vllm:prefix_cache_hits_total").values()) - before
    assert hits >= 4 * 2900
    with (
        served.client() as client,
        client.stream(
            "POST", "/v1/completions", json={"prompt": prompts[0], "max_tokens": 8, "temperature": 0, "stream": True}
        ) as r,
    ):
        frames = frames_of(r.read().decode())
    assert "".join(frame["choices"][0]["text"] for frame in frames) == texts[0]


@pytest.mark.long
def test_both_replicas_have_work_and_one_page_has_their_metrics(served: Served):
    before = served.metrics("vllm:request_success_total")
    threads = [threading.Thread(target=served.complete, args=(f"{i}",), kwargs={"max_tokens": 300}) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = served.metrics("vllm:request_success_total")
    gained = {replica: after[replica] - before.get(replica, 0) for replica in ("0", "1")}
    assert sum(gained.values()) == 12
    assert min(gained.values()) >= 3
    assert served.metrics("foreword:replica_ready") == {"0": 1, "1": 1}


@pytest.mark.long
def test_errors_keys_and_names_are_those_of_one_server(served: Served):
    assert httpx.get(f"{served.url}/v1/models", trust_env=False, timeout=60).status_code == 401
    assert httpx.get(f"{served.url}/ready", trust_env=False, timeout=60).json()["status"] == "ready"
    assert [m["id"] for m in served.get("/v1/models").json()["data"]] == ["tiny"]
    with served.client() as client:
        assert client.head("/v1/models").status_code == 200
    refused = served.complete("a", model="large")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert served.complete("a", max_tokens=-2).json()["error"]["param"] == "max_tokens"
    assert served.get("/nothing").status_code == 404
    assert served.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "none"}).status_code == 400
    assert served.post("/v1/load_lora_adapter", [1]).status_code == 400


@pytest.mark.long
def test_replicas_of_a_server_without_keys_answer_with_the_client_that_the_front_end_tells(talker):
    with serving(talker, "--max-model-len", 512, keys=()) as open_server:
        assert open_server.complete("a").status_code == 200


def test_a_closed_connection_cancels_and_any_request_can_be_asked_about_and_ended(served: Served):
    with served.client() as client:
        headers = {"X-Request-Id": "which?"}
        with client.stream("POST", "/v1/completions", json={"prompt": "a", **LONG}, headers=headers) as response:
            name = response.headers["x-request-id"]
            parts = response.iter_raw()
            next(parts)
            assert '"state":"running"' in served.get(f"/requests/{quote(name)}/why").text
            assert [item["id"] for item in served.get("/requests").json()["data"]] == [name]
        served.wait_until(lambda: not served.get("/requests").json()["data"])
        with client.stream("POST", "/v1/completions", json={"prompt": "a", **LONG}) as response:
            parts = response.iter_raw()
            next(parts)
            assert served.post("/abort", {"request_id": response.headers["x-request-id"]}).json()["aborted"]
            text = b"".join(parts).decode()
    assert '"finish_reason":"abort"' in text
    assert served.post("/abort", {"request_id": "none"}).status_code == 404
    assert served.post("/reset_prefix_cache", {}).json() == {"reset": True}


def test_a_replica_killed_in_the_middle_of_a_stream_is_an_error_event_and_a_retry_succeeds(served: Served):
    before = set(served.replicas())
    restarts = served.metrics("foreword:replica_restarts_total")
    with served.client() as client, client.stream("POST", "/v1/completions", json={"prompt": "b", **LONG}) as response:
        parts = response.iter_text()
        text = next(parts)
        (running,) = [n for n, count in served.metrics("vllm:num_requests_running").items() if count]
        os.kill(int(served.metrics("foreword:replica_pid")[running]), signal.SIGKILL)
        text += "".join(parts)
    events = [event for event in text.split("\n\n") if event]
    assert '"code":"replica_lost"' in events[-1]
    assert all(event.startswith("data: {") and event.endswith("}") for event in events)
    assert served.complete("b").status_code == 200
    served.wait_until(lambda: served.metrics("foreword:replica_ready") == {"0": 1, "1": 1})
    after = served.metrics("foreword:replica_restarts_total")
    assert after[running] == restarts[running] + 1
    assert len(before & set(served.replicas())) == 1


@pytest.mark.long
def test_a_replica_that_hangs_gets_no_requests_and_delays_no_other_route(served: Served):
    served.wait_until(lambda: served.metrics("foreword:replica_ready") == {"0": 1, "1": 1})
    hung = int(served.metrics("foreword:replica_pid")["0"])
    asked = {
        "/metrics": lambda: served.get("/metrics"),
        "/requests": lambda: served.get("/requests"),
        "/abort": lambda: served.post("/abort", {"request_id": "none"}),
    }
    os.kill(hung, signal.SIGSTOP)
    try:
        before = time.monotonic()
        with ThreadPoolExecutor() as pool:
            answers = {path: pool.submit(ask) for path, ask in asked.items()}
        statuses = {path: answer.result().status_code for path, answer in answers.items()}
        assert statuses == {"/metrics": 200, "/requests": 200, "/abort": 404}
        assert time.monotonic() - before < 10
        served.wait_until(lambda: not served.get("/ready").json()["replicas"][0]["ready"])
        assert served.complete("a prompt of the replica that still answers").status_code == 200
    finally:
        os.kill(hung, signal.SIGCONT)
    served.wait_until(lambda: served.metrics("foreword:replica_ready") == {"0": 1, "1": 1})


def test_settings_that_cannot_be_are_refused_before_a_process_is_started():
    with pytest.raises(ConfigError, match=r"kv_events=.tcp.*5557.: replica 1 would use tcp://\*:5558.*differ by 2"):
        Cluster("none", ServerConfig(replicas=2, kv_events="tcp://*:5557", kv_events_replay="tcp://*:5558"), {})
    with pytest.raises(ConfigError, match="replica 1 needs port 65536"):
        Cluster("none", ServerConfig(replicas=2, kv_events="tcp://*:65535"), {})
    with pytest.raises(ConfigError, match="router='best': must be one of"):
        Cluster("none", ServerConfig(replicas=2, router="best"), {})


def test_each_replica_publishes_at_endpoints_of_its_own():
    config = ServerConfig(replicas=3, kv_events="tcp://*:5557", kv_events_replay="ipc:///tmp/replay")
    found = [(each.kv_events, each.kv_events_replay) for each in config.of_replicas()]
    assert found == [("tcp://*:5557", "ipc:///tmp/replay"), ("tcp://*:5558", "ipc:///tmp/replay_dp1"),
                     ("tcp://*:5559", "ipc:///tmp/replay_dp2")]  # fmt: skip
    anywhere = ServerConfig(replicas=2, kv_events="tcp://*:*", kv_events_replay="tcp://*:*")
    assert [each.kv_events for each in anywhere.of_replicas()] == ["tcp://*:*"] * 2


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, 1),
        ({"num_threads": 3}, 3),
        ({"executor": "torch"}, 1),
        ({"executor": "numpy"}, None),
        ({"executor": "device"}, None),
    ],
)
def test_replicas_get_all_options_and_a_share_of_the_cores_where_the_executor_has_threads(
    monkeypatch, options, threads
):
    monkeypatch.delenv("FOREWORD_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    found = []
    monkeypatch.setattr(
        "foreword.cluster.cluster.ReplicaProcess", lambda model, config, options, number: found.append(options)
    )
    others = {"policy": "module:function", "observers": ["module:Class"], "speculation": "ngram"}
    cluster = Cluster("tiny", ServerConfig(replicas=2), {**others, **options})
    cluster._make(1)
    expected = {} if threads is None else {"num_threads": threads}
    assert found == [{**others, **options, **expected}]


@pytest.mark.parametrize("other", [("2.0", "tiny", 512), ("1.0", "large", 512), ("1.0", "tiny", 256)])
def test_replicas_of_another_version_model_or_length_are_refused(monkeypatch: pytest.MonkeyPatch, other: tuple):
    killed = []

    class Replica:
        def __init__(self, model, config, options, number):
            self.identity = other if number else ("1.0", "tiny", 512)
            self.process = SimpleNamespace(kill=lambda: killed.append(number))

        async def ready(self): ...

        async def ended(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("foreword.cluster.cluster.ReplicaProcess", Replica)
    cluster = Cluster("tiny", ServerConfig(replicas=2), {})
    with pytest.raises(ConfigError, match=r"replica 1 is version, model, max_model_len = .*the others are .*SIGHUP"):
        asyncio.run(cluster.start())
    assert killed == [0, 1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": 3}', b'{"prompt": [1, 2]}', b"\xff"])
def test_prompts_that_cannot_be_read_have_no_pieces(body: bytes):
    assert asyncio.run(pieces_of({}, body))[1] == []
