"""Adapters of a server: as models of requests, loaded and dropped by routes."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_rig import HI, serving
from talking_model import write_adapter

from foreword import LLM, SamplingParams
from foreword.server.generation import Generation
from models.encoder_lora_cases import factors_of
from models.lora_files import write_peft
from models.pooling_models import make_pooling
from models.test_gguf_encoders import gguf_of

GREEDY = {"prompt": "Hi", "max_tokens": 8, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def directory(talker, tmp_path):
    for seed, name in enumerate(("law", "code")):
        write_adapter(tmp_path / "adapters" / name, talker, seed)
    shutil.copytree(tmp_path / "adapters" / "law", tmp_path / "outside")
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "adapters"


@pytest.fixture
def server(talker, directory):
    engine = {"loras": {"law": directory / "law"}}
    with serving(
        talker, engine=engine, adapter_directory=str(directory), api_key=("one",), admin_key="root"
    ) as running:
        yield running
        running.check_nothing_is_left()


@pytest.fixture
def answers(talker, directory):
    """The texts of the model and its adapters."""
    with LLM(str(talker), executor="numpy", max_model_len=4096) as llm:
        for name in ("law", "code"):
            llm.load_lora(name, directory / name)
        params = SamplingParams(temperature=0.0, max_tokens=8)
        names = (None, "law", "code")
        outputs = llm.generate(["Hi"] * 3, params, lora=names)
    texts = {name: output.outputs[0].text for name, output in zip(names, outputs, strict=True)}
    assert len(set(texts.values())) == 3
    return texts


def post(server, path, body, key="root"):
    return server.post(path, body, headers={"Authorization": f"Bearer {key}"})


def text_of(server, **body):
    return post(server, "/v1/completions", GREEDY | body, "one").json()["choices"][0]["text"]


def load(server, name, path, **more):
    return post(server, LOAD, {"lora_name": name, "lora_path": str(path), **more})


def models(server):
    found = server.get("/v1/models", headers={"Authorization": "Bearer one"}).json()["data"]
    return {model["id"]: model["parent"] for model in found}


def test_a_request_names_an_adapter_as_its_model(server, answers):
    assert text_of(server) == text_of(server, model="talker") == answers[None]
    assert text_of(server, model="law") == answers["law"]
    completion = post(server, "/v1/chat/completions", {"messages": HI, "max_tokens": 3, "model": "law"}, "one").json()
    assert completion["model"] == "law"
    message = post(server, "/v1/messages", {"messages": HI, "max_tokens": 3, "model": "law"}, "one").json()
    assert message["model"] == "law"
    refused = post(server, "/v1/completions", {**GREEDY, "model": "code"}, "one")
    assert refused.status_code == 404
    assert "'law'" in refused.json()["error"]["message"]


def test_an_adapter_embeds_as_the_model_of_its_name(server, talker, directory):
    with LLM(str(talker), executor="numpy", max_model_len=4096) as llm:
        llm.load_lora("law", directory / "law")
        want = {"talker": llm.embed("Hi")[0], "law": llm.embed("Hi", lora="law")[0]}
    assert np.abs(want["law"] - want["talker"]).max() > 1e-3
    for name, vector in want.items():
        body = post(server, "/v1/embeddings", {"input": "Hi", "model": name}, "one").json()
        np.testing.assert_allclose(body["data"][0]["embedding"], vector, atol=1e-5)


def test_adapters_are_loaded_replaced_and_dropped_while_requests_run(server, answers):
    assert models(server) == {"talker": None, "other": None, "law": "talker"}
    with ThreadPoolExecutor(4) as pool, server.held():
        running = [pool.submit(text_of, server, model="law") for _ in range(2)]
        server.wait_until(lambda: server.llm.num_unfinished == 2 and server.llm.engine.has_work)
        # the engine is in a step: what changes its adapters waits for the end of it
        replaced = pool.submit(load, server, "law", "code", load_inplace=True)
        server._open.set()
        assert replaced.result().json() == {"lora_name": "law", "loaded": True}
    assert [each.result() for each in running] == [answers["law"]] * 2
    assert text_of(server, model="law") == answers["code"]
    assert load(server, "second", "law").status_code == 200
    assert text_of(server, model="second") == answers["law"]
    assert models(server) == {"talker": None, "other": None, "law": "talker", "second": "talker"}
    assert post(server, UNLOAD, {"lora_name": "law"}).json() == {"lora_name": "law", "unloaded": True}
    assert post(server, "/v1/completions", {**GREEDY, "model": "law"}, "one").status_code == 404
    assert post(server, UNLOAD, {"lora_name": "law"}).status_code == 404


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", ["../outside", "link", "/etc", "\0", "code/../../outside", "x" * 5000])
def test_only_what_is_below_the_directory_is_loaded(server, path):
    refused = load(server, "x", path)
    assert refused.status_code in (400, 403)
    assert "x" not in models(server)


def test_an_adapter_that_is_dropped_before_its_request_begins_is_missed_as_a_model_is(server, monkeypatch):
    choose = Generation.choose_model

    def choose_and_drop(self, name):
        model = choose(self, name)
        server.llm.engine.loras.drop("law")
        return model

    missing = post(server, "/v1/completions", GREEDY | {"model": "none"}, "one").json()["error"]
    monkeypatch.setattr(Generation, "choose_model", choose_and_drop)
    response = post(server, "/v1/completions", GREEDY | {"model": "law"}, "one")
    error = response.json()["error"]
    assert response.status_code == 404
    assert {**error, "message": ""} == {**missing, "message": ""}
    assert error["param"] == "model"
    assert "model = 'law': is not the name of an adapter" in error["message"]


def test_a_server_without_a_directory_loads_nothing(talker, directory):
    with serving(talker) as server:
        refused = server.post(LOAD, {"lora_name": "x", "lora_path": str(directory / "law")})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "law", "lora_path": "code"}, "lora_name"),
        ({"lora_name": "talker", "lora_path": "code"}, "lora_name"),
        ({"lora_name": "", "lora_path": "code"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "nowhere"}, "lora_path"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "code", "load_inplace": "yes"}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "code", "rank": 8}, "rank"),
    ],
)
def test_a_wrong_body_is_an_error_that_names_the_field(server, body, field):
    refused = post(server, LOAD, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert [*models(server)] == ["talker", "other", "law"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_the_admin_key_is_needed(server, path):
    assert post(server, path, {"lora_name": "law"}, "one").status_code == 401


def test_a_model_without_adapters_refuses_them(tmp_path):
    model = gguf_of(tmp_path / "bert.gguf", "bert")
    with serving(model, engine={"max_model_len": 24}, adapter_directory=str(tmp_path)) as server:
        answer = server.post(LOAD, {"lora_name": "a", "lora_path": str(tmp_path)})
    assert answer.status_code == 400
    assert "runs no LoRA adapters" in answer.json()["error"]["message"]


def test_an_adapter_of_an_encoder_is_a_model_of_embeddings(tmp_path):
    write_peft(tmp_path / "a", factors_of("bert"), task_type="FEATURE_EXTRACTION")
    with serving(
        make_pooling(tmp_path, "bert"), engine={"max_model_len": 24}, adapter_directory=str(tmp_path)
    ) as server:
        assert server.post(LOAD, {"lora_name": "a", "lora_path": "a"}).status_code == 200
        bodies = ({"model": name, "input": [5, 6, 7]} for name in ("talker", "a"))
        plain, changed = (server.post("/v1/embeddings", body).json()["data"][0]["embedding"] for body in bodies)
    assert np.abs(np.subtract(plain, changed)).max() > 0.01
