"""vLLM on the CPU with its steps checked: healthy steps have no finding, each planted fault is named at once.

CHECKED_REQUESTS=2000 makes the traffic longer.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM: `make vllm`", allow_module_level=True)

from checking import LIVE, SCENARIOS
from faults import FAULTS

HERE = Path(__file__).parent
REQUESTS = int(os.environ.get("CHECKED_REQUESTS", "90"))


NEEDS = {"images": "torchvision"}
"""Scenarios that need a package beside vLLM's own."""


def parameter(name, scenario, *values):
    """A parameter of a test that is skipped where the scenario's package is missing."""
    missing = scenario in NEEDS and find_spec(NEEDS[scenario]) is None
    marks = [pytest.mark.skip(reason=f"{scenario} needs {NEEDS[scenario]}")] if missing else []
    return pytest.param(*values, id=name, marks=marks)


def environment(**more):
    dropped = ("TRITON_INTERPRET", "PYTHONPATH", "FOREWORD_CHECK")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | more


def served(scenario, *options, requests=REQUESTS, **variables):
    """The report of a process of vLLM, and its log."""
    command = [sys.executable, str(HERE / "checking.py"), scenario, "--requests", str(requests), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=3000)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT ")), done.stdout + done.stderr


RUNS = [
    *(parameter(name, name, name, ()) for name in SCENARIOS),
    *(parameter(f"{name}, second runner", name, name, ("--second",)) for name in SCENARIOS),
    *(parameter(f"{name}, scheduled ahead", name, name, ("--second", "--ahead")) for name in ("plain", "windows")),
]


@pytest.mark.parametrize(("scenario", "options"), RUNS)
def test_healthy_steps_have_no_finding(scenario, options, record_property):
    result, _ = served(scenario, *options)
    counts = (result["steps"], result["tensors"], result["num_findings"], result["preemptions"])
    record_property(LIVE, (" ".join((scenario, *options)), *counts, result["seconds"]))
    assert (result["findings"], result["failure"], result["died"]) == ([], "", ""), result["text"]
    assert result["compared"] > (100 if scenario != "pooling" else 50)
    assert result["tensors"] > 10 * result["compared"]


def test_a_forbidden_token_of_drafts_without_their_temperature_is_named():
    result, _ = served("grammars-drafts", "--as-is", "--without-top")
    assert {(tensor, origin) for _, tensor, _, _, origin, _ in result["findings"]} == {("sampled", "runner")}
    assert "the runner wrote 0, expected 'a token that its grammar allows'" in result["text"]


def test_a_top_k_ends_a_vllm_that_drafts():
    result, _ = served("drafts", "--as-is")
    texts = ("selected index k out of range", "is out of bounds for dimension 1", "max(): Expected reduction dim")
    assert any(text in result["died"] for text in texts), result["died"]  # which of them depends on memory's content


@pytest.mark.parametrize("fault", [parameter(name, planted.scenario, name) for name, planted in FAULTS.items()])
def test_a_planted_fault_is_named(fault):
    planted = FAULTS[fault]
    options = ["--fault", fault, "--seed", "1", *(["--second"] if planted.second else [])]
    result, log = served(planted.scenario, *options, requests=60)
    assert result["failure"] == ""
    first = [finding for finding in result["findings"] if finding[0] == result["findings"][0][0]]
    assert (planted.tensor, planted.origin) in {(tensor, origin) for _, tensor, _, _, origin, _ in first}
    assert result["findings"][0][5].splitlines()[0] in log


@pytest.mark.parametrize("options", [(), ("--second",)], ids=["first", "second"])
def test_outputs_are_the_same_with_and_without_the_check(options):
    (checked, _), (free, _) = (served("plain", *options, FOREWORD_CHECK=level) for level in ("full", "off"))
    assert checked["compared"] > 100
    assert "steps" not in free
    assert sum(len(tokens) for outputs in checked["outputs"].values() for tokens in outputs) > 500
    assert checked["outputs"] == free["outputs"]


def test_greedy_tokens_with_states_at_borders_are_those_of_the_first_runner():
    (first, _), (second, _) = (
        served("states-at-borders", "--greedy", *options, requests=60) for options in ((), ("--second",))
    )
    assert "first model runner" in first["text"]
    assert "second model runner" in second["text"]
    assert sum(len(tokens) for outputs in first["outputs"].values() for tokens in outputs) > 500
    assert first["outputs"] == second["outputs"]


def test_a_recording_can_be_compared_and_is_as_defined(tmp_path):
    from foreword.insight import conform

    path = tmp_path / "steps.jsonl"
    result, _ = served("windows", FOREWORD_CHECK=f"full,record:{path}")
    report = conform.run(path)
    assert report.ok, report
    assert path.read_text().count('{"step"') == result["compared"]


def test_the_entry_point_follows_a_worker_without_an_option(tmp_path):
    entry = tmp_path / "followed-0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: followed\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[vllm.general_plugins]\nfollowed = foreword.vllm.check_plugin:plugin\n")
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(tmp_path)]))
    report = tmp_path / "report"
    variables = {"FOREWORD_CHECK": f"full,report:{report}", "PYTHONPATH": paths}
    result, _ = served("plain", "--plain-worker", requests=10, **variables)
    assert result["compared"] > 20
    assert report.read_text().splitlines()[1].startswith(f"{result['steps']} steps followed")
