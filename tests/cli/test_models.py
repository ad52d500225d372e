"""`foreword models`: the list, a description, removal."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from processes import run

from foreword.executors.packed.file import Part
from foreword.executors.packed.store import PackedStore
from foreword.models import registry
from foreword.models.loader import load_model


@pytest.fixture
def cached(tmp_path):
    """The environment of a cache that has one of the known models, whose content does not matter."""
    model = registry.KNOWN["qwen2.5-coder-1.5b"]
    path = tmp_path / "models" / model.name / model.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.size)  # takes no space
    return {"FOREWORD_HOME": str(tmp_path), "COLUMNS": "80"}, path


def test_the_list_has_size_licence_and_what_is_here(run_here, cached):
    environment, path = cached
    status, shown, error = run_here("models", "list", env=environment)
    assert (status, error) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    rows = {line.split()[0]: line for line in shown.splitlines()[1:] if not line.startswith(" ")}
    assert rows.keys() == registry.KNOWN.keys()
    for name, row in rows.items():
        model = registry.KNOWN[name]
        assert f" {model.size / 1e6:.0f} MB " in row
        assert f" {model.license} " in row
    assert " yes " in rows["qwen2.5-coder-1.5b"]
    assert " no " in rows["gemma3-270m"]
    found = [json.loads(line) for line in run_here("models", "list", "--json", env=environment)[1].splitlines()]
    assert {row["name"]: row["bytes"] for row in found} == {m.name: m.size for m in registry.KNOWN.values()}
    assert [row["path"] for row in found if row["name"] == "qwen2.5-coder-1.5b"] == [str(path)]


def test_a_removed_model_is_gone(run_here, cached):
    environment, path = cached
    assert run_here("models", "rm", "qwen2.5-coder-1.5b", env=environment) == (0, "1117.3 MB freed\n", "")
    assert not path.exists()
    assert run_here("models", "rm", "qwen2.5-coder-1.5b", env=environment)[1].endswith("is not in the cache\n")


def test_packed_forms_are_listed_pruned_and_removed_with_their_model(run_here, cached, monkeypatch):
    environment, _ = cached
    monkeypatch.setenv("FOREWORD_HOME", environment["FOREWORD_HOME"])
    store, model = PackedStore(1 << 30), registry.KNOWN["qwen2.5-coder-1.5b"]

    def keep(digest, version):
        recipe = {"files": [digest], "version": version}
        with store.writing(recipe, 1) as out:
            store.keep(out, recipe, {"a": Part("x", np.zeros(3_000_000, np.uint8))})

    for digest, version in ((model.sha256, 1), (model.sha256, 2), ("0" * 64, 1)):
        keep(digest, version)
    sizes = [entry.size for entry in store.entries()]
    found = [json.loads(line) for line in run_here("models", "list", "--json", env=environment)[1].splitlines()]
    assert {row["name"]: row["packed_bytes"] for row in found if row["packed_bytes"]} == {model.name: 2 * sizes[0]}
    assert "Packed forms: 9 MB" in run_here("models", "list", env=environment)[1]
    assert run_here("models", "prune", "--bytes", "7MB", env=environment) == (0, "3.0 MB freed\n", "")
    assert len(store.entries()) == 2
    status, _, error = run_here("models", "prune", "--bytes", "many", env=environment)
    assert (status, "--bytes='many'" in error) == (2, True)
    assert run_here("models", "rm", model.name, env=environment)[0] == 0
    assert [entry.files for entry in store.entries()] == [("0" * 64,)]
    assert run_here("models", "prune", env=environment)[1] == "3.0 MB freed\n"
    assert not store.entries()


def test_a_description_tells_what_the_file_holds(run_here, talker):
    status, shown, error = run_here("models", "info", talker, "--json")
    assert (status, error) == (0, "")
    facts, spec = json.loads(shown), load_model(str(talker)).spec
    assert (facts["path"], facts["layers"], facts["vocabulary"]) == (str(talker), spec.num_layers, spec.vocab_size)
    assert facts["keys not read"] == "none"
    assert facts["bytes"] == sum(file.stat().st_size for file in talker.iterdir())
    table = run_here("models", "info", talker, env={"COLUMNS": "40"})[1].splitlines()
    assert max(map(len, table)) <= 40


def test_into_a_pipe_every_fact_is_one_line_without_padding(talker):
    shown = run("models", "info", talker)[1].splitlines()
    assert f"path           {talker}" in shown
    assert all(line == line.rstrip() for line in shown)


@pytest.mark.parametrize("columns", ["40", "64", "200"])
def test_a_list_in_a_narrow_window_has_every_name_in_full(run_here, cached, columns):
    shown = run_here("models", "list", env=cached[0] | {"COLUMNS": columns})[1]
    assert registry.KNOWN.keys() <= set(shown.split())


def test_an_unknown_model_is_one_line(run_here, tmp_path):
    for command in ("pull", "info", "rm"):
        status, shown, error = run_here("models", command, "smolm2", env={"FOREWORD_HOME": str(tmp_path)})
        assert (status, shown, len(error.splitlines())) == (2, "", 1)
        assert "did you mean 'smollm2'?" in error


def test_a_description_tells_the_sampling_that_requests_without_their_own_have(run_here, talker, tmp_path):
    assert json.loads(run_here("models", "info", talker, "--json")[1])["sampling"] == "none"
    folder = shutil.copytree(talker, tmp_path / "model")
    values = {"temperature": 0.6, "do_sample": True, "top_k": 20, "max_length": 50}
    (folder / "generation_config.json").write_text(json.dumps(values))
    facts = json.loads(run_here("models", "info", folder, "--json")[1])
    assert (facts["sampling"], facts["not followed"]) == ("temperature = 0.6, top_k = 20", "max_length = 50")
    _, _, error = run_here("run", "hi", "-m", folder, "--top-k", "1", "--max-tokens", "2")
    assert "as the model suggests, temperature = 0.6" in error
    ignored = ("--generation-config", "ignore", "--max-tokens", "2")
    assert run_here("run", "hi", "-m", folder, *ignored) == run_here("run", "hi", "-m", talker, "--max-tokens", "2")
    assert "as the model suggests" not in run_here("run", "hi", "-m", folder, "--quiet", "--max-tokens", "2")[2]


# -- search

REPOSITORIES = [
    {"id": "org/smol-GGUF", "downloads": 900, "tags": ["gguf", "text-generation"], "gated": False},
    {"id": "org/smol-onnx", "downloads": 500, "tags": ["onnx"]},
    {"id": "org/smol", "downloads": 70, "tags": ["safetensors"], "gated": "manual"},
]


@contextmanager
def hub_of_our_own(status: int, answer: object) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment of a hub with this answer, and the paths that it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "COLUMNS": "200", "HF_HUB_OFFLINE": "0"}, asked
        server.shutdown()


@pytest.mark.long
def test_a_search_shows_known_models_then_those_of_the_hub_with_weights_that_are_read():
    pytest.importorskip("huggingface_hub")
    with hub_of_our_own(200, REPOSITORIES) as (environment, asked):
        status, shown, error = run("models", "search", "smol", "--limit", 7, env=environment)
        assert (status, error) == (0, "")
        rows = [line.split() for line in shown.splitlines()]
        assert [row[:2] for row in rows[1:]] == [["smollm2", "known"], ["org/smol-GGUF", "hub"], ["org/smol", "hub"]]
        assert "gguf, 900 downloads" in shown
        assert "safetensors, 70 downloads in 30 days; its terms must be accepted on the hub" in shown
        assert parse_qs(urlsplit(asked[0]).query) == {"search": ["smol"], "sort": ["downloads"], "limit": ["35"]}
        found = run("models", "search", "smol", "--limit", 1, "--json", env=environment)[1].splitlines()
        assert [json.loads(line).get("repository") for line in found] == [None, "org/smol-GGUF"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("status", "answer"), [(503, []), (200, [{}])])
def test_without_a_hub_the_known_models_are_searched_and_the_reason_is_said(status, answer):
    pytest.importorskip("huggingface_hub")
    with hub_of_our_own(status, answer) as (environment, asked):
        code, shown, error = run("models", "search", "smol", env=environment)
        assert (code, shown.split()[:7][-2:]) == (0, ["smollm2", "known"])
        assert error.startswith("foreword: the hub was not searched: ")
        assert len(error.splitlines()) == len(asked) == 1


def test_a_search_that_finds_nothing_is_refused_with_what_was_searched():
    status, shown, error = run("models", "search", "no-such", "--offline")
    assert (status, shown, len(error.splitlines())) == (2, "", 1)
    assert "'no-such': no such model is known by name; the hub was not searched: --offline" in error
