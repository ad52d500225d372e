"""`foreword models`: the list, a description, removal."""

import json
import shutil

import pytest
from processes import run

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


def test_the_list_has_size_licence_and_what_is_here(cached):
    environment, path = cached
    status, shown, error = run("models", "list", env=environment)
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
    found = [json.loads(line) for line in run("models", "list", "--json", env=environment)[1].splitlines()]
    assert {row["name"]: row["bytes"] for row in found} == {m.name: m.size for m in registry.KNOWN.values()}
    assert [row["path"] for row in found if row["name"] == "qwen2.5-coder-1.5b"] == [str(path)]


def test_a_removed_model_is_gone(cached):
    environment, path = cached
    assert run("models", "rm", "qwen2.5-coder-1.5b", env=environment) == (0, "1117.3 MB freed\n", "")
    assert not path.exists()
    assert run("models", "rm", "qwen2.5-coder-1.5b", env=environment)[1].endswith("is not in the cache\n")


def test_a_description_tells_what_the_file_holds(talker):
    status, shown, error = run("models", "info", talker, "--json")
    assert (status, error) == (0, "")
    facts, spec = json.loads(shown), load_model(str(talker)).spec
    assert (facts["path"], facts["layers"], facts["vocabulary"]) == (str(talker), spec.num_layers, spec.vocab_size)
    assert facts["keys not read"] == "none"
    assert facts["bytes"] == sum(file.stat().st_size for file in talker.iterdir())
    table = run("models", "info", talker, env={"COLUMNS": "40"})[1].splitlines()
    assert max(map(len, table)) <= 40


def test_into_a_pipe_every_fact_is_one_line_without_padding(talker):
    shown = run("models", "info", talker)[1].splitlines()
    assert f"path           {talker}" in shown
    assert all(line == line.rstrip() for line in shown)


@pytest.mark.parametrize("columns", ["40", "64", "200"])
def test_a_list_in_a_narrow_window_has_every_name_in_full(cached, columns):
    shown = run("models", "list", env=cached[0] | {"COLUMNS": columns})[1]
    assert registry.KNOWN.keys() <= set(shown.split())


def test_an_unknown_model_is_one_line(tmp_path):
    for command in ("pull", "info", "rm"):
        status, shown, error = run("models", command, "smolm2", env={"FOREWORD_HOME": str(tmp_path)})
        assert (status, shown, len(error.splitlines())) == (2, "", 1)
        assert "did you mean 'smollm2'?" in error


def test_a_description_tells_the_sampling_that_requests_without_their_own_have(talker, tmp_path):
    assert json.loads(run("models", "info", talker, "--json")[1])["sampling"] == "none"
    folder = shutil.copytree(talker, tmp_path / "model")
    values = {"temperature": 0.6, "do_sample": True, "top_k": 20, "max_length": 50}
    (folder / "generation_config.json").write_text(json.dumps(values))
    facts = json.loads(run("models", "info", folder, "--json")[1])
    assert (facts["sampling"], facts["not followed"]) == ("temperature = 0.6, top_k = 20", "max_length = 50")
    _, _, error = run("run", "hi", "-m", folder, "--top-k", "1", "--max-tokens", "2")
    assert "as the model suggests, temperature = 0.6" in error
    ignored = ("--generation-config", "ignore", "--max-tokens", "2")
    assert run("run", "hi", "-m", folder, *ignored) == run("run", "hi", "-m", talker, "--max-tokens", "2")
    assert "as the model suggests" not in run("run", "hi", "-m", folder, "--quiet", "--max-tokens", "2")[2]
