"""Replicas replaced while they serve, adapters on new ones, and a start that fails: `make replicas`."""

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from processes import start
from replica_rig import PATIENCE, Served, serving
from talking_model import write_adapter


def test_an_update_of_all_replicas_loses_no_request(served: Served):
    before, answers, is_over = set(served.replicas()), Counter(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers[served.complete("c", max_tokens=40).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    served.process.send_signal(signal.SIGHUP)
    served.wait_until(lambda: len(now := set(served.replicas())) == 2 and not now & before)
    served.wait_until(lambda: any("were replaced" in note for note in served.notes))
    is_over.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}


def test_adapters_are_on_all_replicas_also_on_new_ones(served: Served, talker: Path):
    write_adapter(talker.parent / "law", talker)
    body = {"lora_name": "law", "lora_path": "law"}
    assert served.post("/v1/load_lora_adapter", body).status_code == 200
    for pid in served.replicas():
        os.kill(pid, signal.SIGKILL)
        served.wait_until(lambda gone=pid: gone not in served.replicas())
        served.wait_until(lambda: served.metrics("foreword:replica_ready") == {"0": 1, "1": 1})
        with served.client() as client:
            found = [
                client.post("/v1/completions", json={"model": "law", "prompt": c, "max_tokens": 4}) for c in "abcdef"
            ]
        assert {r.status_code for r in found} == {200}
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "law"}).status_code == 200
    assert served.complete("a", model="law").status_code == 404


def test_cache_events_of_each_replica_have_its_rank_also_after_an_update(talker: Path, tmp_path: Path):
    zmq = pytest.importorskip("zmq", reason="needs foreword[events]")
    endpoint = f"ipc://{tmp_path}/events"
    expected = [(0, endpoint), (1, f"{endpoint}_dp1")]
    with serving(talker, "--max-model-len", 2000, "--kv-events", endpoint) as served, zmq.Context() as context:
        for turn in ("first", "second"):
            sources = served.get("/kv_event_sources").json()["data"]
            assert sorted((s["data_parallel_rank"], s["endpoint"]) for s in sources) == expected
            with context.socket(zmq.SUB) as reader:
                for _, place in expected:
                    reader.connect(place)
                reader.subscribe(b"kv-events")
                ranks: set[int] = set()
                for number in range(50):
                    given = [(f"{turn} {number} {letter} " * 20,) for letter in "abcd"]
                    threads = [threading.Thread(target=served.complete, args=each) for each in given]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                    while reader.poll(50):
                        ranks.add(msgspec.msgpack.decode(reader.recv_multipart()[2])[2])
                    if ranks == {0, 1}:
                        break
            assert ranks == {0, 1}
            if turn == "first":
                served.process.send_signal(signal.SIGHUP)
                served.wait_until(lambda: any("were replaced" in note for note in served.notes))
        assert served.metrics("foreword:replica_restarts_total") == {"0": 0, "1": 0}


def test_a_model_that_cannot_be_loaded_is_told_by_one_line(tmp_path: Path):
    with start("serve", "none.gguf", "--replicas", 2, "--port", 0, cwd=tmp_path) as process:
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, error
    assert b"none.gguf" in error
    assert error.count(b"\n") == 1, error
