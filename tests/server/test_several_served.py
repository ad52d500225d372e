"""A server of several real models over HTTP: names, states, budgets, adapters, metrics, and unloading under load."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from several_rig import PATIENCE, serving_several
from talking_model import write_adapter, write_talking_model

from foreword import LLM, SamplingParams
from foreword.cli.served_models import served_models
from foreword.engine import engine_config
from foreword.engine.async_llm import AsyncLLM
from foreword.engine.build import load
from foreword.engine.footprint import footprint
from foreword.engine.model import model_of
from foreword.engine.options import split_options
from foreword.errors import ConfigError
from foreword.executors.kinds import DEVICE, TORCH, TRANSFORMERS
from foreword.executors.options import ExecutorOptions
from foreword.executors.packed import parts, store
from foreword.machine import own_memory_bytes
from foreword.models.loader import load_model
from foreword.native import available
from foreword.server import batches
from foreword.server.config import ServerConfig
from foreword.server.loading import Loader
from foreword.server.run import bound_socket
from foreword.server.run_several import SeveralServer, several
from foreword.server.served import ServedModel
from foreword.server.shared import Shared
from models.pooling_models import POOLING, make_pooling

OPTIONS = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 20, "seed": 0}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Four models; the second one's weights are others."""
    folder = tmp_path_factory.mktemp("several")
    return {name: write_talking_model(folder / name, 256 + i) for i, name in enumerate("abcd")}


def rows(models, **own):
    return [
        ServedModel(model=str(path), names=(name, f"{name}-alias"), options=OPTIONS, **own.get(name, {}))
        for name, path in models.items()
    ]


def size_of(path) -> int:
    given = split_options(OPTIONS)
    return footprint(load(str(path), given.executor, given.of_executor), given.config, budget=None).total


@pytest.fixture(scope="module")
def server(models):
    two = 2 * size_of(models["a"]) + 1000
    settings = {"load_on_demand": True, "ram_budget": two, "adapter_directory": str(models["a"].parent)}
    with serving_several(rows(models, d={"pin": True}), **settings) as found:
        yield found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["a", "b-alias", "c", "d"])
def test_the_model_that_a_request_names_answers_as_it_does_alone(server, models, name):
    answer = server.post("/v1/completions", {"model": name, "prompt": "hello", **GREEDY}).json()
    assert answer["model"] == name
    with LLM(str(models[name[0]]), **OPTIONS) as llm:
        (expected,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=6))
    assert answer["choices"][0]["text"] == expected.outputs[0].text


@pytest.mark.long
def test_the_list_of_models_tells_their_states_and_sizes(server, models):
    server.post("/v1/completions", {"model": "a", "prompt": "x", **GREEDY})
    listed = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert set(listed) >= {"a", "a-alias", "b", "c", "d"}
    assert (listed["a"]["state"], listed["a"]["bytes"], listed["a"]["pinned"]) == (
        "loaded",
        size_of(models["a"]),
        False,
    )
    assert (listed["d"]["state"], listed["d"]["pinned"]) == ("loaded", True)
    assert server.get("/v1/models/a-alias").json()["root"] == "a"
    assert server.get("/ready").json()["models"]["a"] == "loaded"
    assert sum(state == "loaded" for state in server.states.values()) <= 2
    unknown = server.post("/v1/completions", {"model": "e", "prompt": "x"})
    assert (unknown.status_code, "Use 'a', 'a-alias', 'b'" in unknown.json()["error"]["message"]) == (404, True)


def test_every_kind_of_request_loads_its_model(server):
    bodies = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **GREEDY}),
        ("/v1/responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [65]}),
    )
    for name, (path, body) in zip("bbccbc", bodies, strict=True):
        answer = server.post(path, {"model": name, **body})
        assert answer.status_code == 200, answer.text
        assert server.states[name] == "loaded"
    assert server.get("/tokenizer_info", params={"model": "a"}).json()["vocab_size"] == 260
    assert server.states["a"] == "loaded"


def test_operations_about_requests_and_caches_cover_all_loaded_models(server):
    assert server.get("/requests").json()["data"] == []
    assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
    assert server.get("/requests/none/why").status_code == 404
    assert server.post("/abort", {"request_id": "none"}).status_code == 404
    server.post("/v1/completions", {"model": "a", "prompt": "x", **GREEDY})
    lines = server.get("/metrics").text.splitlines()
    assert len([line for line in lines if line.startswith("# TYPE vllm:num_requests_running ")]) == 1
    assert {'vllm:num_requests_running{model_name="a"} 0.0', 'vllm:num_requests_running{model_name="d"} 0.0'} <= {
        *lines
    }
    assert 'foreword:model_state{model_name="a",state="loaded"} 1.0' in lines


def test_a_stream_is_aborted_in_the_model_that_has_it(server):
    body = {"model": "c", "prompt": "x", "max_tokens": 200, "temperature": 0, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
        pieces = response.iter_lines()
        next(pieces)
        assert [(one["id"], one["model"]) for one in server.get("/requests").json()["data"]] == [("mine", "c")]
        assert server.get("/requests/mine/why").json()["id"] == "mine"
        assert server.post("/abort", {"request_id": "mine"}).status_code == 200
        assert any('"abort"' in line for line in pieces)


@pytest.mark.long
def test_an_adapter_of_a_model_that_was_unloaded_answers_as_before(server, models):
    write_adapter(models["a"].parent / "law", models["a"])
    load_body = {"model": "a", "lora_name": "law", "lora_path": "law"}
    assert server.post("/v1/load_lora_adapter", load_body).status_code == 200
    ask = {"model": "law", "prompt": "hello", **GREEDY}
    before = server.post("/v1/completions", ask).json()
    for name in "bc":
        server.post("/v1/completions", {"model": name, "prompt": "x", **GREEDY})
    assert server.states["a"] == "unloaded"
    after = server.post("/v1/completions", ask).json()
    assert (after["model"], after["choices"]) == ("law", before["choices"])
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "law"}).status_code == 200
    assert server.post("/v1/completions", ask).status_code == 404


def test_an_adapter_s_name_is_that_of_one_model_also_while_it_is_loaded(models, monkeypatch):
    write_adapter(models["a"].parent / "code", models["a"])
    settings = {"load_on_demand": True, "adapter_directory": str(models["a"].parent)}
    with serving_several(rows(models), **settings) as server, ThreadPoolExecutor(1) as pool:
        for name in "ab":
            server.post("/v1/completions", {"model": name, "prompt": "x", **GREEDY})
        engine = server.models.find("a").context.engine
        gate, begun, load = threading.Event(), threading.Event(), engine.load_lora

        async def load_late(*given):
            begun.set()
            await asyncio.to_thread(gate.wait, 60)
            return await load(*given)

        monkeypatch.setattr(engine, "load_lora", load_late)
        body = {"lora_name": "code", "lora_path": "code"}
        first = pool.submit(server.post, "/v1/load_lora_adapter", {"model": "a", **body})
        assert begun.wait(60)
        second = server.post("/v1/load_lora_adapter", {"model": "b", **body})
        pulled = server.post("/api/pull", {"model": "code"})
        gate.set()
        assert first.result().status_code == 200
        assert (second.status_code, "is being loaded" in second.text) == (400, True)
        assert (pulled.status_code, "is the name of an adapter" in pulled.text) == (400, True)
        later = server.post("/api/pull", {"model": "code"})
        assert (later.status_code, "is the name of an adapter of 'a'" in later.text) == (400, True)


def test_a_model_that_cannot_be_loaded_answers_with_the_reason_until_it_can(models, tmp_path):
    broken = write_talking_model(tmp_path / "broken", 256)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:100])
    served = [ServedModel(model=str(path), names=(path.name,), options=OPTIONS) for path in (broken, models["a"])]
    with serving_several(served, load_on_demand=True) as server:
        body = {"model": "broken", "prompt": "x", **GREEDY}
        failed = server.post("/v1/completions", body)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_failed")
        assert "model.safetensors" in failed.json()["error"]["message"]
        assert "model.safetensors" in server.get("/v1/models/broken").json()["error"]
        assert server.post("/v1/completions", {**body, "model": "a"}).status_code == 200
        (broken / "model.safetensors").write_bytes(weights)
        assert server.post("/v1/completions", body).status_code == 200
        assert server.get("/v1/models/broken").json()["error"] is None


def test_a_budget_that_is_too_small_for_a_model_is_refused_with_figures(models):
    with serving_several(rows(models), load_on_demand=True, ram_budget=400_000) as server:
        answer = server.post("/v1/completions", {"model": "a", "prompt": "x"})
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "a KV pool of 0.5 MiB and, beside it" in message
        assert "of 0.4 MiB of ram_budget" in message


@pytest.mark.one_in(2)
@pytest.mark.skipif(not available(), reason="only the native executor maps weights")
@pytest.mark.parametrize("are_kept", [True, False])
def test_two_models_of_one_file_have_its_weights_once(models, tmp_path, monkeypatch, are_kept):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(store, "_FREE_BYTES", 0)
    options = {**OPTIONS, "executor": "native", **({} if are_kept else {"weight_cache_bytes": 0})}
    given = split_options(OPTIONS)
    size = footprint(load(str(models["a"]), given.executor, given.of_executor), given.config, budget=None)
    budget = 2 * size.total - size.weights + 1000
    served = [ServedModel(model=str(models["a"]), names=(name,), options=options) for name in ("one", "two")]
    with serving_several(served, load_on_demand=True, ram_budget=budget) as server:
        for name in ("one", "two"):
            assert server.post("/v1/completions", {"model": name, "prompt": "x", **GREEDY}).status_code == 200
        assert server.states == {"one": "loaded" if are_kept else "unloaded", "two": "loaded"}
        assert server.models.num_bytes == (2 * size.total - size.weights if are_kept else size.total)


def test_blocks_kept_in_host_memory_are_part_of_a_model_s_memory(models):
    given = split_options({**OPTIONS, "host_cache_bytes": 1 << 22})
    model = load(str(models["a"]), given.executor, given.of_executor)
    assert footprint(model, given.config, budget=None).total == size_of(models["a"]) + (1 << 22)


def test_a_model_on_a_gpu_takes_none_of_the_host_s_memory(models):
    on_gpu = DEVICE.read_options({"device": "cuda"})
    model = model_of(load_model(str(models["a"])), DEVICE, on_gpu)
    assert footprint(model, engine_config({"max_model_len": 256}), budget=1).total == 0
    assert not TORCH.read_options({"device": "cuda:1"}).is_on_host
    assert not TRANSFORMERS.read_options({"device": "cuda"}).is_on_host
    assert all(kind.read_options({"device": "cpu"}).is_on_host for kind in (TORCH, DEVICE))


def test_only_engines_on_the_host_take_turns(models, monkeypatch):
    made, of = [], AsyncLLM.of
    monkeypatch.setattr(AsyncLLM, "of", lambda llm, turns: made.append(turns) or of(llm, turns=turns))
    shared = Shared.of(ServerConfig())
    loader = Loader(ServerConfig(), shared, 2)
    for is_on_host in (True, False):
        monkeypatch.setattr(ExecutorOptions, "is_on_host", is_on_host)
        read = loader(rows(models)[0], {}, lambda num_bytes: None)
        asyncio.run(read.load().engine.close())
    assert made == [loader.turns, None]
    shared.store.close()


def test_options_for_all_models_are_checked_before_a_model_is_read(models):
    shared = Shared.of(ServerConfig())
    served = ServedModel(model=str(models["a"]), names=("a",), options={"mmproj": 5}, common=frozenset({"mmproj"}))
    with pytest.raises(ConfigError, match=r"mmproj=5: expected a text"):
        Loader(ServerConfig(), shared, 1)(served, {}, lambda num_bytes: None)
    shared.store.close()


def test_a_model_that_embeds_is_served_beside_one_that_generates(models, tmp_path):
    bert = make_pooling(tmp_path, "bert")
    served = [
        ServedModel(model=str(models["a"]), names=("a",), options=OPTIONS),
        ServedModel(model=str(bert), names=("bert",), options={"max_model_len": 24}),
    ]
    texts = [text["token_ids"] for text in POOLING["bert"]["texts"]]
    with LLM(str(bert), max_model_len=24) as llm:
        expected = llm.embed(texts)
    with serving_several(served) as server:
        found = server.post("/v1/embeddings", {"model": "bert", "input": texts}).json()["data"]
        np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=1e-5)
        assert server.post("/v1/completions", {"model": "a", "prompt": "x", **GREEDY}).status_code == 200
        refused = server.post("/v1/completions", {"model": "bert", "prompt": "x"})
        assert refused.status_code == 400, refused.text
        assert server.states == {"a": "loaded", "bert": "loaded"}


def test_an_encoder_has_the_options_of_all_models_that_it_can_have_and_no_wrong_ones_of_its_own(models, tmp_path):
    bert = make_pooling(tmp_path, "bert")
    longest = load_model(str(bert)).spec.max_model_len
    given = {"max_model_len": longest + 1, "kv_cache_bytes": 1 << 20, "kv_format": "bf16", "num_threads": 1}
    config = ServerConfig(load_on_demand=True)
    tables = [
        {"model": str(bert), "name": ["of decoders"], "host_cache_bytes": 1 << 20},
        {"model": str(bert), "name": ["too long"], "max_model_len": longest + 1},
    ]
    served = served_models([str(models["a"]), str(bert)], tables, config, given)
    with serving_several(served, load_on_demand=True) as server:
        body = {"model": str(bert), "input": POOLING["bert"]["texts"][0]["token_ids"]}
        assert server.post("/v1/embeddings", body).status_code == 200
        assert server.post("/v1/completions", {"model": str(models["a"]), "prompt": "x", **GREEDY}).status_code == 200
        found = [entry.context.engine.engine.states.max_model_len for entry in server.models.entries[:2]]
        assert found == [longest + 1, longest]
        for name, reason in (
            ("of decoders", "host_cache_bytes=1048576: only decoders have it"),
            ("too long", f"max_model_len={longest + 1}: the model was made for {longest} tokens"),
        ):
            refused = server.post("/v1/embeddings", {**body, "model": name})
            assert refused.status_code == 503
            assert reason in refused.json()["error"]["message"]


def soak(server, names, threads: int, requests: int) -> list[str]:
    """Send requests for all models from several threads; return those that were not answered as the first was."""
    expected = {name: server.post("/v1/completions", {"model": name, "prompt": name, **GREEDY}).text for name in names}
    texts = {name: text.partition('"choices"')[2].partition(',"usage"')[0] for name, text in expected.items()}
    wrong, lock = [], threading.Lock()

    def client(number):
        for i in range(requests):
            name = names[(number + i * i) % len(names)]
            answer = server.post("/v1/completions", {"model": name, "prompt": name, **GREEDY})
            if texts[name] not in answer.text:
                with lock:
                    wrong.append(answer.text)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(client, number) for number in range(threads)]:
            future.result()
    return wrong


@pytest.mark.long
def test_models_load_and_unload_under_load_and_no_request_is_lost_and_memory_stays(server):
    assert soak(server, "abc", threads=4, requests=2) == []
    before, loads = own_memory_bytes(), sum(entry.num_loads for entry in server.models.entries)
    assert soak(server, "abc", threads=4, requests=4) == []
    assert sum(entry.num_loads for entry in server.models.entries) >= loads + 3
    assert own_memory_bytes() < before + (16 << 20)
    assert server.models.num_bytes <= server.models.budget


@pytest.mark.long
def test_an_adapter_cannot_take_the_name_of_another_model_or_of_its_adapter(server, models):
    write_adapter(models["a"].parent / "law", models["a"])
    body = {"model": "a", "lora_name": "law", "lora_path": "law"}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    for model, name, owner in (("a", "b", "b"), ("a", "b-alias:latest", "b"), ("b", "law", "a")):
        refused = server.post("/v1/load_lora_adapter", {**body, "model": model, "lora_name": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        assert f"is a name of the model '{owner}' or of its adapter" in refused.json()["error"]["message"]
    refused = server.post("/v1/load_lora_adapter", {**body, "lora_name": "a:latest"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert server.post("/v1/completions", {"model": "b", "prompt": "hello", **GREEDY}).json()["model"] == "b"
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "law"}).status_code == 200


def gated(models, monkeypatch) -> threading.Event:
    """Let no model be read before the event that is returned."""
    gate, load = threading.Event(), models._read

    def read(*given):
        gate.wait(60)
        return load(*given)

    monkeypatch.setattr(models, "_read", read)
    return gate


def test_the_time_of_a_request_goes_on_while_its_model_is_loaded(models, monkeypatch):
    with serving_several(rows(models), load_on_demand=True) as server:
        gate = gated(server.models, monkeypatch)
        body = {"model": "a", "prompt": "x", **GREEDY}
        for own, headers in (({"timeout": 0.1}, {}), ({}, {"X-Request-Timeout": "0.1"})):
            late = server.post("/v1/completions", {**body, **own}, headers=headers)
            assert (late.status_code, late.json()["error"]["message"]) == (504, "the request's time is over")
        assert server.post("/v1/completions", {**body, "timeout": 0}).status_code == 400
        gate.set()
        assert server.post("/v1/completions", {**body, "timeout": 60}).status_code == 200


@pytest.mark.long
def test_stored_responses_are_read_and_deleted_without_a_model(models, tmp_path):
    gone = ServedModel(model=str(tmp_path / "gone"), names=("gone",), options=OPTIONS)
    with serving_several([gone, *rows(models)], load_on_demand=True) as server:
        body = {"model": "b", "input": "Hi", "temperature": 0, "max_output_tokens": 4}
        path = f"/v1/responses/{server.post('/v1/responses', body).json()['id']}"
        assert server.post("/api/generate", {"model": "b", "keep_alive": 0}).status_code == 200
        assert server.get(path).json()["model"] == "b"
        assert len(server.get(f"{path}/input_items").json()["data"]) == 1
        assert server.client.delete(path).json()["deleted"] is True
        assert server.get(path).status_code == 404
        for wanted in ("/v1/files", "/v1/files/file-0", "/v1/batches", "/v1/batches/batch_0"):
            refused = server.get(wanted)
            assert (refused.status_code, "--data-directory" in refused.json()["error"]["message"]) == (400, True)
        assert server.states["gone"] == "unloaded"
        assert server.get("/v1/models/gone").json()["error"] is None


def finished(server, batch_id: str) -> dict:
    until = time.monotonic() + PATIENCE
    while (batch := server.get(f"/v1/batches/{batch_id}").json())["status"] not in ("completed", "failed"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return batch


def upload(server, lines) -> str:
    texts = "\n".join(
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
        for name, body in lines
    )
    sent = server.client.post("/v1/files", data={"purpose": "batch"}, files={"file": texts.encode()})
    return sent.json()["id"]


def records_of(server, file_id: str) -> dict[str, dict]:
    texts = server.get(f"/v1/files/{file_id}/content").text.splitlines()
    return {record["custom_id"]: record["response"] for record in map(json.loads, texts)}


@pytest.mark.long
def test_a_batch_loads_each_model_that_its_lines_name_once_and_goes_on_after_a_restart(models, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE", 0.02)
    settings = {"load_on_demand": True, "ram_budget": size_of(models["a"]) + 1000, "data_directory": str(tmp_path)}
    names = ["a", "b", "b-alias", "a", "none", "b", "a"]
    lines = [(str(i), {"model": name, "prompt": f"x{i}", **GREEDY}) for i, name in enumerate(names)]
    lines.append(("first", {"prompt": "y", **GREEDY}))  # a request of the first model
    with serving_several(rows(models), **settings) as server:
        gate = gated(server.models, monkeypatch)
        body = {"input_file_id": upload(server, lines), "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = server.post("/v1/batches", body).json()["id"]
        until = time.monotonic() + PATIENCE
        while not server.models.waiting:  # a line that waits for its model
            assert time.monotonic() < until
        stopping = threading.Timer(0.2, gate.set)
        stopping.start()
    with serving_several(rows(models), **settings) as server:
        batch = finished(server, batch_id)
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
        assert {entry.name: entry.num_loads for entry in server.models.entries} == {"a": 1, "b": 1, "c": 0, "d": 0}
        (unknown,) = records_of(server, batch["error_file_id"]).items()
        assert (unknown[0], unknown[1]["status_code"]) == ("4", 404)
        answers = records_of(server, batch["output_file_id"])
        for name, body in lines:
            if body.get("model") != "none":
                alone = server.post("/v1/completions", body).json()
                found = answers[name]["body"]
                assert (found["model"], found["choices"]) == (alone["model"], alone["choices"])
        assert not server.models.waiting
        assert not any(entry.num_requests for entry in server.models.entries)


@pytest.mark.long
def test_batches_whose_models_have_no_room_together_use_them_in_turns(models, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE", 0.02)
    settings = {"load_on_demand": True, "ram_budget": size_of(models["a"]) + 1000, "data_directory": str(tmp_path)}
    with serving_several(rows(models), api_key=("one", "two"), **settings) as server:
        client, found = server.client, []
        for key, name in (("one", "a"), ("two", "b")):
            client.headers["Authorization"] = f"Bearer {key}"
            lines = [(str(i), {"model": name, "prompt": f"x{i}", **GREEDY}) for i in range(30)]
            body = {"input_file_id": upload(server, lines), "endpoint": "/v1/completions", "completion_window": "24h"}
            found.append(server.post("/v1/batches", body).json()["id"])
        for key, batch_id in zip(("one", "two"), found, strict=True):
            client.headers["Authorization"] = f"Bearer {key}"
            assert finished(server, batch_id)["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert [entry.num_loads for entry in server.models.entries] == [1, 1, 0, 0]


def test_a_model_that_cannot_be_loaded_is_tried_once_for_all_lines_of_a_batch(models, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE", 0.02)
    gone = ServedModel(model=str(tmp_path / "gone"), names=("gone",), options=OPTIONS)
    settings = {"load_on_demand": True, "data_directory": str(tmp_path / "data")}
    with serving_several([*rows(models), gone], **settings) as server:
        read, tried = server.models._read, []
        monkeypatch.setattr(server.models, "_read", lambda *given: tried.append(given[0].names[0]) or read(*given))
        lines = [(f"{name} {i}", {"model": name, "prompt": "x", **GREEDY}) for name in ("gone", "a") for i in range(5)]
        body = {"input_file_id": upload(server, lines), "endpoint": "/v1/completions", "completion_window": "24h"}
        for count in (1, 2):
            batch = finished(server, server.post("/v1/batches", body).json()["id"])
            assert batch["request_counts"] == {"total": 10, "completed": 5, "failed": 5}
            for failed in records_of(server, batch["error_file_id"]).values():
                assert (failed["status_code"], failed["body"]["error"]["code"]) == (503, "model_failed")
                assert "model = 'gone': cannot be loaded" in failed["body"]["error"]["message"]
            assert tried.count("gone") == count


def test_a_server_of_other_models_does_not_start_on_the_data_of_one(models, tmp_path):
    settings = {"load_on_demand": True, "data_directory": str(tmp_path)}
    with serving_several(rows(models), **settings) as server, serving_several(rows(models), **settings):
        others = several(rows(models)[:2], server.models.config)
        with pytest.raises(ConfigError, match="a server of other models uses it"), socket.socket() as sock:
            SeveralServer(others, sock)
        others.shared.store.close()


@pytest.mark.long
def test_slots_are_of_the_model_that_a_request_names(models, tmp_path):
    settings = {"load_on_demand": True, "ram_budget": size_of(models["a"]) + 1000, "slot_save_path": str(tmp_path)}
    prompt = {"prompt": "abcdefghij" * 12, "max_tokens": 4, "temperature": 0}
    with serving_several(rows(models), **settings) as server:
        text = server.post("/v1/completions", {"model": "b", **prompt}).json()["choices"][0]["text"]
        file = {"filename": "talk.bin", "model": "b"}
        saved = server.post("/slots/0?action=save", file).json()
        assert saved["n_saved"] == 124
        assert [one["n_tokens"] for one in server.get("/slots", params={"model": "a"}).json()] == [0] * 8
        assert server.states["b"] == "unloaded"
        other = server.post("/slots/0?action=restore", {**file, "model": "a"})
        assert (other.status_code, "talk.bin" in other.text) == (400, True)
        assert server.post("/slots/0?action=restore", file).json()["n_restored"] == 124
        again = server.post("/v1/completions", {**prompt, "model": "b", "prompt": prompt["prompt"] + text}).json()
        assert again["usage"]["prompt_tokens_details"]["loaded_tokens"] == {"slots": 112}
        assert server.post("/slots/0?action=erase", {"model": "none"}).status_code == 404


def test_an_abort_of_a_request_that_waits_for_its_model_says_so(models, monkeypatch):
    with serving_several(rows(models), load_on_demand=True) as server, ThreadPoolExecutor(1) as pool:
        gate, body = gated(server.models, monkeypatch), {"model": "a", "prompt": "x", **GREEDY}
        waiting = pool.submit(server.post, "/v1/completions", body, headers={"X-Request-Id": "mine"})
        while "mine" not in server.models.waiting:
            assert not waiting.done()
        refused = server.post("/abort", {"request_id": "mine"})
        gate.set()
        message = "request 'mine': waits for its model 'a', which is loading. Abort it later, or close its connection"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
        assert waiting.result().status_code == 200


def test_a_server_that_is_ended_while_it_loads_at_the_start_limits_the_time_of_its_end(models, monkeypatch):
    found, ended = several(rows(models), ServerConfig(port=0)), threading.Event()
    gate = gated(found, monkeypatch)
    with bound_socket("127.0.0.1", 0) as sock:
        server = SeveralServer(found, sock, lambda url: None, ended.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        server.should_exit = True
        assert ended.wait(60)
        gate.set()
        thread.join(60)
    assert not thread.is_alive()
