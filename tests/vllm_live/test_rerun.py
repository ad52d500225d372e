"""A recorded vLLM again on its own runner without a model: healthy and faulty, shrunk, and as a test."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM: `make vllm`", allow_module_level=True)

from test_checking import environment, parameter, served

from foreword.insight import Add, Step, Trace

HERE = Path(__file__).parent
FAULT = "moved_row_keeps_blocks"
OF_IMAGES = "height_of_the_token_before"


def run(*arguments, plugin=None, **variables):
    """Run Python with these arguments, and the fault as a plugin of vLLM if ``plugin`` is its folder."""
    paths = [os.environ.get("PYTHONPATH", ""), *([str(plugin), str(HERE)] if plugin else [])]
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=600)


def planting(folder, fault):
    """A plugin of vLLM that plants a fault."""
    entry = folder / "planted-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:plugin\n")
    (folder / "planted.py").write_text(f"import faults\n\ndef plugin():\n    faults.{fault}(None, None)\n")
    return folder


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    return planting(tmp_path_factory.mktemp("plugin"), FAULT)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The steps of a vLLM with the fault."""
    path = tmp_path_factory.mktemp("faulty") / "steps.jsonl"
    result, _ = served("plain", "--fault", FAULT, requests=40, FOREWORD_CHECK=f"full,record:{path}")
    assert result["num_findings"] > 0
    return path


RECORDED = [
    *(parameter(name, name, name, ()) for name in ("adapters", "windows-drafts", "states", "images")),
    *(
        parameter(f"{name}, second runner", name, name, ("--second",))
        for name in ("windows-drafts", "states-at-borders", "images")
    ),
]


@pytest.mark.parametrize(("scenario", "options"), RECORDED)
def test_a_healthy_recording_is_prepared_as_defined(scenario, options, tmp_path):
    path = tmp_path / "steps.jsonl"
    served(scenario, *options, requests=40, FOREWORD_CHECK=f"full,record:{path}")
    done = run("foreword", "rerun", path, "--engine", "vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = sum(isinstance(event, Step) for event in Trace.read(path).events)
    assert f"{steps} steps prepared by vLLM" in done.stdout
    assert "CPUModelRunner without a model: as defined" in done.stdout
    assert steps > 50
    assert "in another order" not in done.stdout


def test_a_fault_occurs_again_where_the_runner_has_it_and_only_there(faulty, plugin):
    done = run("foreword", "rerun", faulty, plugin=plugin)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "what was recorded occurs again" in done.stdout
    assert "here: step" in done.stdout
    healthy = run("foreword", "rerun", faulty)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "none occurs again" in healthy.stdout
    assert "(not here)" in healthy.stdout


def test_the_cause_shrinks_to_a_few_events_and_becomes_a_test_that_needs_vllm_alone(faulty, plugin, tmp_path):
    small = tmp_path / "small.jsonl"
    words = ["shrink", faulty, "--failing", "foreword.vllm.rerun:fails", "-o", small]
    done = run("foreword", *words, plugin=plugin)
    assert done.returncode == 0, done.stderr
    events = Trace.read(small).events
    assert len(events) <= 8 < len(Trace.read(faulty).events)
    assert sum(isinstance(event, Add) for event in events) <= 2
    by_command = run("foreword", "rerun", small, "--tensor", "block_table", plugin=plugin)
    assert by_command.returncode == 1, by_command.stderr
    test = tmp_path / "test_small.py"
    test.write_text(run("foreword", "rerun", small, "--as-test", plugin=plugin).stdout)
    assert not any(line.startswith(("import foreword", "from foreword")) for line in test.read_text().splitlines())
    pytest_words = ["pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, test]
    with_fault, without = run(*pytest_words, plugin=plugin), run(*pytest_words)
    assert (with_fault.returncode, without.returncode) == (1, 0), with_fault.stdout + without.stdout
    assert "block_table[0, 0]" in with_fault.stdout


@pytest.mark.parametrize("scenario", [parameter("images", "images", "images")])
def test_a_fault_in_the_rotary_positions_of_images_occurs_again_and_becomes_a_test(scenario, tmp_path):
    path, test = tmp_path / "steps.jsonl", tmp_path / "test_images.py"
    served(scenario, "--fault", OF_IMAGES, requests=10, FOREWORD_CHECK=f"full,record:{path}")
    plugin = planting(tmp_path / "plugin", OF_IMAGES)
    done, healthy = run("foreword", "rerun", path, plugin=plugin), run("foreword", "rerun", path)
    assert (done.returncode, healthy.returncode) == (1, 0), done.stderr + healthy.stderr
    assert "what was recorded occurs again" in done.stdout
    assert re.search(r"here: step \d+: mrope_positions", done.stdout)
    test.write_text(run("foreword", "rerun", path, "--as-test", plugin=plugin).stdout)
    pytest_words = ["pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, test]
    with_fault, without = run(*pytest_words, plugin=plugin), run(*pytest_words)
    assert (with_fault.returncode, without.returncode) == (1, 0), with_fault.stdout + without.stdout
    assert "mrope_positions" in with_fault.stdout


def test_refusals_name_the_reason(faulty, tmp_path):
    head, *lines = faulty.read_text().splitlines()
    other = tmp_path / "second.jsonl"
    other.write_text("\n".join([head.replace("first model runner", "second model runner"), *lines]) + "\n")
    done = run("foreword", "rerun", other, "--as-test")
    assert (done.returncode, done.stdout) == (2, "")
    assert "need Triton or Foreword" in done.stderr
    done = run("foreword", "rerun", faulty, "--tensor", "logits")
    assert done.returncode == 2
    assert "is not compared" in done.stderr
