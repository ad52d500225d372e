"""`python benchmarks`: its commands, their options and their results."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import bad_values
import pytest
from parts import overlap
from parts.commands import app
from typer.testing import CliRunner

import foreword
from foreword.cli.app import run
from foreword.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMANDS = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}
WORKS = {name: ["--model", "none.gguf"] for name in ("speculation", "overlap", "serve", "sampling", "mixed")}
"""Arguments with a model that does not exist: what passes the checks ends at the model."""


def bench(*arguments):
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def outcome(capsys, monkeypatch, *arguments):
    """Return the exit status and standard error of `python benchmarks` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as end:
        run(app)
    return end.value.code, capsys.readouterr().err


@pytest.mark.long
def test_the_folder_runs_as_a_program_from_any_directory(tmp_path):
    source = str(Path(foreword.__file__).parents[1])
    command = [sys.executable, str(ROOT / "benchmarks"), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_has_every_command(name):
    assert f"| `python benchmarks {name}" in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_number_out_of_range_is_refused_with_the_name_of_its_option(capsys, monkeypatch, name):
    tried = list(bad_values.numbers([(name, COMMANDS[name])]))
    assert tried
    bad_values.assert_refused(partial(outcome, capsys, monkeypatch), [name], WORKS.get(name, []), tried)


@pytest.mark.parametrize("name", ["speculation", "overlap"])
def test_a_model_that_does_not_exist_ends_with_one_line(capsys, monkeypatch, name):
    status, error = outcome(capsys, monkeypatch, name, "--model", "missing.gguf")
    assert status == 2
    assert error.startswith("foreword: ")
    assert error.count("\n") == 1


def test_numbers_of_requests_are_positive_integers_separated_by_commas(monkeypatch):
    given_to_run = []
    monkeypatch.setattr(overlap, "run", lambda model, **given: given_to_run.append(given) or [])
    bench("overlap", "--at-once", "2, 16", "--weight-format", "q4")
    assert given_to_run == [{"at_once": [2, 16], "max_tokens": 64, "repeats": 3, "options": {"weight_format": "q4"}}]
    for wrong in ("", "0", "1,x", "1,,2", "-1", "9" * 5000, "999999999"):
        with pytest.raises(ConfigError, match=r"--at-once .*: must be whole numbers above zero"):
            bench("overlap", "--at-once", wrong)


@pytest.mark.long
@pytest.mark.model
def test_quality_is_held_to_float32(tmp_path, smollm2_path):
    text = tmp_path / "text"
    text.write_text("The harbour of Easthaven lies at the mouth of the river, where ships load grain and timber.\n" * 3)
    options = ("--text", str(text), "--num-texts", "2", "--num-tokens", "20", "--json", "--num-threads", "1")
    lines = [
        json.loads(line)
        for line in bench("quality", str(smollm2_path), "--formats", "auto/int8", *options).splitlines()
    ]
    exact, short = lines
    assert [exact[name] for name in ("change", "mean_change", "largest_change", "same_tokens")] == [0, 0, 0, 1]
    assert 0 < short["mean_change"] < short["largest_change"] < 1
    assert exact["error"] == 0 < short["error"]
    assert short["perplexity"] / exact["perplexity"] - 1 == pytest.approx(short["change"])
    assert short["same_tokens"] > 0.9
    with pytest.raises(ConfigError, match="give a longer text"):
        bench("quality", str(smollm2_path), "--text", str(text), "--num-tokens", "500")
    with pytest.raises(ConfigError, match="WEIGHTS/CACHE"):
        bench("quality", "--formats", "int8")
