"""`foreword models`: the list, a description, removal."""

import json

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
