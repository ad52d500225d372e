"""Replicas replaced while they serve, and adapters on new ones: `make replicas`."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path

from replica_rig import Served
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
