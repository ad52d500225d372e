"""The application of Ray Serve: answers, streams, cancels, kills, metrics, and where requests go."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import frames_of
from talking_model import write_adapter

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError
from foreword.server.config import ServerConfig

ray = pytest.importorskip("ray", reason="needs foreword[ray]: `make ray`")
from ray import serve  # noqa: E402

from foreword.ray.scaling import wanted_replicas  # noqa: E402
from foreword.ray.serving import application  # noqa: E402
from foreword.ray.version import check_version  # noqa: E402

PATIENCE = 90.0
LONG = {"prompt": "a", "max_tokens": 90000, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(cluster: None, talker: Path) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = ServerConfig(served_model_name=("tiny",), api_key=("key",), adapter_directory=str(talker.parent))
    serve.run(application(str(talker), config, num_replicas=2, max_model_len=100000), name="tiny")
    headers = {"Authorization": "Bearer key"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False, headers=headers) as found:
        yield found
    serve.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def metrics(client: httpx.Client, name: str) -> dict[str, float]:
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["replica"]] += sample.value
    return dict(found)


def kill(replica: str) -> None:
    (found,) = [known for known in ray.util.list_named_actors(all_namespaces=True) if replica in known["name"]]
    ray.kill(ray.get_actor(found["name"], namespace=found["namespace"]))


def replicas(client: httpx.Client) -> set[str]:
    return {state["replica"] for state in client.get("/ready").json().get("replicas", ())}


def test_answers_and_streams_are_those_of_the_engine(client: httpx.Client, talker: Path):
    (known,) = LLM(str(talker)).generate(["Once"], SamplingParams(max_tokens=12, temperature=0))
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "temperature": 0}
    whole = client.post("/v1/completions", json=body).json()
    assert whole["choices"][0]["text"] == known.outputs[0].text
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        frames = frames_of(response.read().decode())
    assert "".join(frame["choices"][0]["text"] for frame in frames) == known.outputs[0].text


def test_errors_keys_and_names_are_those_of_the_server(client: httpx.Client):
    assert httpx.get(f"{client.base_url}/v1/models", trust_env=False).status_code == 401
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny"]
    refused = client.post("/v1/completions", json={"model": "large", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    for body in ({"lora_name": "x"}, {"lora_name": "x", "lora_path": "none"}, [1]):
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404
    assert len(client.get("/ready").json()["replicas"]) == 2


def test_prompts_that_begin_alike_meet_and_others_are_spread(client: httpx.Client):
    prompts = [letter * 3000 for letter in "bcdefghi"]
    before, asked = metrics(client, "vllm:prefix_cache_hits_total"), metrics(client, "vllm:prompt_tokens_total")
    for _ in range(2):
        for prompt in prompts:
            assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200
    after, tokens = metrics(client, "vllm:prefix_cache_hits_total"), metrics(client, "vllm:prompt_tokens_total")
    assert sum(after.values()) - sum(before.values()) >= 8 * 2900
    assert len(tokens) == 2
    assert sum(tokens.values()) - sum(asked.values()) == 16 * 3000


def test_a_closed_connection_cancels(client: httpx.Client):
    with client.stream("POST", "/v1/completions", json=LONG) as response:
        parts = response.iter_raw()
        next(parts)
        wait_until(lambda: len(client.get("/requests").json()["data"]) == 1)
    wait_until(lambda: client.get("/requests").json()["data"] == [])


def test_a_replica_killed_in_the_middle_of_a_stream_is_an_error_event_and_a_retry_succeeds(client: httpx.Client):
    with client.stream("POST", "/v1/completions", json=LONG) as response:
        parts = response.iter_text()
        text = next(parts)
        running = [name for name, count in metrics(client, "vllm:num_requests_running").items() if count]
        assert len(running) == 1
        kill(running[0])
        text += "".join(parts)
    assert '"code":"replica_lost"' in text.split("\n\n")[-2]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
    wait_until(lambda: len(client.get("/ready").json().get("replicas", ())) == 2)


def test_adapters_are_on_all_replicas_also_on_new_ones(client: httpx.Client, talker: Path):
    write_adapter(talker.parent / "law", talker)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert client.post(load, json={"lora_name": "law", "lora_path": "law"}).status_code == 200
    assert client.post(load, json={"lora_name": "law", "lora_path": "law"}).status_code == 400  # is loaded already

    def statuses() -> set[int]:
        given = [{"model": "law", "prompt": letter * 700, "max_tokens": 2} for letter in "abcdef"]
        return {client.post("/v1/completions", json=body).status_code for body in given}

    assert statuses() == {200}
    before = replicas(client)
    for name in sorted(before):
        kill(name)
        wait_until(lambda gone=name: len(now := replicas(client)) == 2 and gone not in now)
    assert statuses() == {200}
    assert client.post(unload, json={"lora_name": "law"}).status_code == 200
    assert statuses() == {404}
    assert not [each for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == "foreword"]


def test_another_version_of_foreword_is_refused():
    with pytest.raises(ConfigError, match=r"is installed here, and 0\.0\.1 where .* install one version on all nodes"):
        check_version("0.0.1")


def test_a_new_deployment_loses_no_request(client: httpx.Client, talker: Path):
    answers, is_over = Counter(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers[client.post("/v1/completions", json={"prompt": "c", "max_tokens": 40}).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = {state["replica"] for state in client.get("/ready").json()["replicas"]}
    config = ServerConfig(served_model_name=("tiny",), api_key=("key",), max_requests=512)
    serve.run(application(str(talker), config, num_replicas=2, max_model_len=90000), name="tiny")
    wait_until(lambda: not before & {state["replica"] for state in client.get("/ready").json()["replicas"]})
    is_over.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 90000


def test_load_adds_a_replica_and_its_end_removes_one_without_a_lost_request(client: httpx.Client, talker: Path):
    config = ServerConfig(served_model_name=("tiny",), api_key=("key",))
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 2}
    scaled = application(
        str(talker), config, num_replicas=(1, 2), autoscaling=delays, max_num_seqs=2, max_model_len=9000
    )
    serve.run(scaled, name="tiny")
    wait_until(lambda: len(replicas(client)) == 1)
    answers, is_over = Counter(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            body = {"prompt": "d", "max_tokens": 400, "ignore_eos": True}
            answers[client.post("/v1/completions", json=body).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(replicas(client)) == 2)
    is_over.set()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(replicas(client)) == 1)
    assert set(answers) == {200}


@pytest.mark.parametrize(
    ("current", "waiting", "pressure", "wanted"),
    [
        (2, [0, 0], [0.7, 0.7], 2),
        (2, [3, 0], [0.5, 0.5], 3),
        (2, [0, 0], [1.0, 1.0], 3),
        (4, [0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1], 1),
        (3, [], [], 3),
    ],
)
def test_replicas_follow_what_waits_and_how_full_caches_are(current, waiting, pressure, wanted):
    assert wanted_replicas(current, dict(enumerate(waiting)), dict(enumerate(pressure))) == wanted
