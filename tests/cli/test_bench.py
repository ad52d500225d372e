"""`foreword bench`: its options, and its results as a table and as JSON."""

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from foreword.bench import requests, serving
from foreword.bench.host import HostResult
from foreword.cli import bench as commands
from foreword.cli.app import app
from foreword.errors import ConfigError

RESULT = serving.ServingResult("W1", 1, 128, 128, 2.0, 64.0, 500.0, 66.0, 250.0, 260.0, 15.0, 0)


@pytest.fixture
def measured(monkeypatch):
    """The settings of every engine made, and the workloads and repeats measured."""
    found = []
    monkeypatch.setattr(commands, "LLM", lambda model, **settings: found.append((model, settings)))
    monkeypatch.setattr(
        serving, "best_of", lambda llm, name, repeats: found.append((name, repeats)) or replace(RESULT, workload=name)
    )
    return found


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize(
    ("command", "workloads", "repeats"),
    [("throughput", ["W2", "W3", "W4", "W5", "W7"], 2), ("latency", ["W1"], 3), ("prefill", ["W6"], 2)],
)
def test_a_command_measures_its_workloads(measured, command, workloads, repeats):
    bench(command)
    assert measured == [
        ("smollm2", {"max_num_seqs": 64, "max_model_len": 4096}),
        *((name, repeats) for name in workloads),
    ]


def test_longer_prompts_are_measured_when_they_are_named(measured):
    bench("prefill", "--workloads", "W6,W8", "--max-model-len", "8192")
    assert measured[0][1]["max_model_len"] == 8192
    assert [name for name, _ in measured[1:]] == ["W6", "W8"]


@pytest.mark.parametrize("name", requests.NAMES)
def test_the_longest_request_counts_its_output(name):
    made = requests.make(name)
    assert made.longest == max(len(p) + n for p, n in zip(made.prompts, made.output_lens, strict=True))
    assert requests.PROMPTS.get(name) in (None, made.num_prompt_tokens)
    if name in ("W8", "W9"):  # it fills the positions of a model
        assert made.longest in (8192, 32768)


def test_the_engine_gets_the_options_that_were_given(measured):
    bench("latency", "--num-threads", "3", "--kv-format", "int8", "--model", "mine", "--repeats", "1")
    assert measured[0] == ("mine", {"max_num_seqs": 64, "max_model_len": 4096, "num_threads": 3, "kv_format": "int8"})
    assert measured[1] == ("W1", 1)


def test_results_are_json_lines_or_a_table(measured):
    lines = bench("throughput", "--workloads", "W2,W7", "--json").splitlines()
    assert [json.loads(line) for line in lines] == [asdict(replace(RESULT, workload=n)) for n in ("W2", "W7")]
    table = bench("throughput", "--workloads", "W2,W7").splitlines()
    assert table[0].split() == ["output", "prompt", "decode", "first", "token", "ms", "step", "ms", "wall", "s"]
    assert table[2].split() == ["W2", "64.0", "500.0", "66.0", "250.0", "260.0", "15.00", "2.00"]
    assert table[-1].startswith("W7")
    assert table[-1].endswith(" 64 output tok/s")


def test_an_unknown_workload_is_named(measured):
    with pytest.raises(ConfigError, match=r"--workloads 'W0': must be of W1, W2"):
        bench("throughput", "--workloads", "W1,W0")
    with pytest.raises(ConfigError, match=r"--workloads 'W7': must be of W6, W8, W9"):
        bench("prefill", "--workloads", "W6,W7")
    assert measured == []


@pytest.mark.parametrize("arguments", [("host", "--steps", "0"), ("latency", "--repeats", "0")])
def test_a_measurement_without_runs_is_refused(arguments):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert "Invalid value for" in result.output
    assert arguments[1] in result.output


def test_too_few_steps_for_the_warm_up_turn_are_refused():
    with pytest.raises(ConfigError, match="num_steps = 25: the first turn is not counted; give more than chunk = 25"):
        bench("host", "--steps", "25")


@pytest.mark.parametrize("command", ["throughput", "latency", "prefill"])
def test_charts_have_a_bar_per_workload_and_figure(measured, command, tmp_path):
    output = bench(command, "--plot", str(tmp_path / "a.svg"), "--json")
    workloads = [json.loads(line)["workload"] for line in output.splitlines()]
    text = (tmp_path / "a.svg").read_text()
    assert all(text.count(f">{name}<") == 3 for name in workloads)
    assert text.count("<title>") == 4 * len(workloads)
    with pytest.raises(ConfigError, match="must end with"):
        bench(command, "--plot", "a.png")


def test_charts_of_the_host_have_every_workload_and_contender(monkeypatch, tmp_path):
    results = [[HostResult(w, engine, 10.0 * i, 2.0) for i, engine in enumerate("abc", 1)] for w in ("one", "two")]
    monkeypatch.setattr(commands.host_bench, "run", lambda num_steps: iter(results))
    bench("host", "--plot", str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert [text.count(f"host time of a step, {name} ") for name in ("one", "two")] == [1, 1]
    assert text.count("<title>") == 2 * 3 * 2
