"""The findings of `foreword doctor`, on machines made of files."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.cli.app import app
from foreword.insight import machine as insight
from foreword.insight.machine import examine, measured, processor_name, reached
from foreword.installation import install
from foreword.models import registry


def machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {finding.subject: finding for finding in examine(root)}


def test_a_limit_below_the_processors_is_followed_and_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("FOREWORD_NUM_THREADS", raising=False)
    files = {
        "sys/fs/cgroup/cpu.max": "50000 100000",
        "sys/fs/cgroup/memory.max": "1000000000",
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 9000000 kB\n",
    }
    found = machine(tmp_path, files)
    assert found["processors"].verdict == "ok"
    assert re.fullmatch(r"0\.5 of \d+ by the container's limit; 1 thread", found["processors"].value)
    assert found["memory limit"].value == "1.0 GB by the container's limit"
    monkeypatch.setenv("FOREWORD_NUM_THREADS", "3")
    found = machine(tmp_path, {})["processors"]
    assert (found.verdict, found.value[-33:]) == ("slow", "3 threads by FOREWORD_NUM_THREADS"), found
    assert "FOREWORD_NUM_THREADS=1" in found.fix


def test_a_package_that_is_not_installed_is_absent_and_has_a_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(insight.EXTRAS, "torch", ("no-such-distribution", "executor torch"))
    found = machine(tmp_path, {})["extra torch"]
    assert (found.verdict, found.fix) == ("absent", f"For executor torch: {install('torch')}")


@pytest.mark.parametrize(
    ("enabled", "value", "verdict"),
    [
        ("always [madvise] never", "madvise", "ok"),
        ("[always] madvise never", "always", "ok"),
        ("always madvise [never]", "off", "slow"),
    ],
)
def test_huge_pages(tmp_path, enabled, value, verdict):
    found = machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": enabled})["huge pages"]
    assert (found.value, found.verdict) == (value, verdict)


@pytest.mark.parametrize(("free_kb", "verdict"), [(100_000, "slow"), (8_000_000, "ok")])
def test_memory(tmp_path, free_kb, verdict):
    text = f"MemTotal:       16000000 kB\nMemAvailable:    {free_kb} kB\nHugePages_Total:    0\n"
    assert machine(tmp_path, {"proc/meminfo": text})["memory"].verdict == verdict


def test_the_governor_that_keeps_frequencies_low(tmp_path):
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    assert "frequency" not in machine(tmp_path, {f"{folder}/scaling_governor": "performance"})
    found = machine(tmp_path, {f"{folder}/scaling_governor": "powersave", f"{folder}/scaling_driver": "acpi-cpufreq"})
    assert found["frequency"].verdict == "slow"
    found = machine(tmp_path, {f"{folder}/scaling_driver": "intel_pstate"})  # its powersave raises frequencies too
    assert "frequency" not in found


def test_the_processor_has_a_name(tmp_path):
    machine(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"})
    assert processor_name(tmp_path) == "Some CPU @ 2 GHz"
    assert processor_name(tmp_path / "nothing")


def test_an_instruction_set_below_the_best_is_slow(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", "scalar")
    found = machine(tmp_path, {})
    assert found["instruction set"].verdict == "slow"
    assert "FOREWORD_ISA" in found["instruction set"].fix


def test_a_missing_model_has_a_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "_installed", lambda part: [])
    found = machine(tmp_path, {})["default model"]
    assert (found.verdict, found.fix) == ("missing", "Run `foreword models pull smollm2`.")


def test_limits_follow_from_the_rates():
    model = registry.DEFAULT
    rates = {
        "memory_bytes": 10.0 * model.size,
        "i8_ops": 2e3 * model.num_parameters,
        "f32_flops": 1e9,
        "bf16_flops": 2e9,
    }
    found = {finding.subject: finding.value for finding in measured(rates, model)}
    assert found["memory rate"].endswith("at most 10 tokens/s per request")
    assert found["8-bit arithmetic"].endswith("at most 1000 prompt tokens/s")


def test_the_command_prints_lines_or_json():
    quick = CliRunner().invoke(app, ["doctor", "--quick"])
    assert quick.exit_code == 0
    assert "instruction set" in quick.output
    lines = CliRunner().invoke(app, ["doctor", "--quick", "--json"]).output.splitlines()
    assert {json.loads(line)["verdict"] for line in lines} <= {"ok", "slow", "missing", "absent"}


def test_the_roofline_is_the_share_of_each_limit_that_the_model_reaches():
    rates = {"memory_bytes": 20e9, "i8_ops": 800e9}
    model = registry.DEFAULT
    decode, prefill = reached(rates, model, 10e9 / model.size, 200e9 / (2 * model.num_parameters))
    assert (decode.subject, prefill.subject) == ("roofline, decode", "roofline, prefill")
    assert decode.value.startswith("██████████░░░░░░░░░░ 50%: ")
    assert decode.value.endswith(" = 10.0 of 20.0 GB/s of memory")
    assert prefill.value.startswith("█████░░░░░░░░░░░░░░░ 25%: ")
    assert prefill.value.endswith(" = 200.0 of 800.0 GOP/s of 8-bit arithmetic")


def test_the_report_looks_for_a_package_of_each_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name != "test"}
    assert insight.EXTRAS.keys() == extras.keys()
    for extra, (package, _) in insight.EXTRAS.items():
        assert package in [re.match(r"[\w-]+", one)[0] for one in extras[extra]], extra
