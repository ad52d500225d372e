"""A server publishes the events of its cache at the addresses that it was given."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_rig import PATIENCE, serving

import foreword


def test_a_server_without_events_has_no_sources(talker):
    with serving(talker) as server:
        assert server.get("/kv_event_sources").json() == {"object": "list", "data": []}


@pytest.mark.long
def test_a_served_model_publishes_its_events(talker):
    zmq, msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgspec").msgpack
    options = [
        "--kv-events",
        "tcp://127.0.0.1:*",
        "--kv-events-replay",
        "tcp://127.0.0.1:*",
        "--kv-events-topic",
        "kv@t",
    ]
    command = [sys.executable, "-c", "from foreword.cli import main; main()", "serve", str(talker), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(foreword.__file__).parents[1])}
    with subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stderr.readline().split()[-1]
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                (source,) = client.get("/kv_event_sources").json()["data"]
                client.post("/v1/completions", json={"prompt": "a" * 100, "max_tokens": 2}).raise_for_status()
            assert (source["topic"], source["format"], source["block_size"]) == ("kv@t", "map", 16)
            with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
                reader.connect(source["replay_endpoint"])
                tokens: list[int] = []
                while len(tokens) < 96:
                    reader.send_multipart([b"", (0).to_bytes(8, "big")])
                    tokens = []
                    while True:
                        assert reader.poll(1000 * PATIENCE)
                        _, number, payload = reader.recv_multipart()
                        if number == b"\xff" * 8:
                            break
                        for event in msgpack.decode(payload)[1]:
                            tokens += event["token_ids"]
            assert bytes(tokens[:96]) == b"a" * 96
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
