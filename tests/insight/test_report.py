"""`foreword doctor --report` has what a report of a fault needs, and nothing private."""

import json
import os
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from foreword.batch import KVGroup, RequestStates
from foreword.cli.app import app
from foreword.insight.machine import Finding
from foreword.insight.report import report
from foreword.trace.header import TraceHeader
from foreword.trace.writer import TraceWriter

SECRET = "a-secret-name"


def failed_steps(path):
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(block_size=2)])
    with TraceWriter(path, TraceHeader.of_states(states, 8)) as writer:
        writer.add(SECRET, [1, 2, 3], [[1, 2]])
        writer.step([SECRET], np.array([3]))
        writer.commit({SECRET: [4]})
        writer.step([SECRET], np.array([1]))
        writer.fail(f"StepError: request {SECRET}")


def test_a_report_has_the_sizes_of_the_last_steps_that_failed(tmp_path):
    failed_steps(tmp_path / "foreword-1-step-2-x.jsonl.gz")
    (tmp_path / "foreword-1-step-2-cut.jsonl.gz").write_bytes(b"")
    os.utime(tmp_path / "foreword-1-step-2-x.jsonl.gz", (0, 0))
    made = report([Finding("python", "3.11")], {"FOREWORD_SERVE_API_KEY": SECRET, "HOME": SECRET}, tmp_path)
    (tmp_path / "foreword-1-step-2-cut.jsonl.gz").unlink()
    again = report([Finding("model", f"{Path.home()}/model")], {"FOREWORD_SERVE_API_KEY": SECRET}, tmp_path)
    assert made["last_failed_steps"] == []  # the newest cannot be read
    assert again["last_failed_steps"] == [
        {"num_tokens": [3], "num_drafts": {}, "num_copies": 0},
        {"num_tokens": [1], "num_drafts": {}, "num_copies": 0, "failed": "StepError"},
    ]
    assert again["findings"][0]["value"] == "~/model"
    assert again["variables"] == ["FOREWORD_SERVE_API_KEY"]
    assert {"foreword", "packages", "findings"} <= set(again)
    assert SECRET not in json.dumps([made, again])


def test_links_folders_and_unreadable_files_of_a_shared_folder_are_no_failures(tmp_path):
    failed_steps(tmp_path / "steps.jsonl.gz")
    (tmp_path / "foreword-1-step-1-linked.jsonl.gz").symlink_to("steps.jsonl.gz")
    (tmp_path / "foreword-1-step-2-dangling.jsonl.gz").symlink_to("none")
    (tmp_path / "foreword-1-step-3-looping.jsonl.gz").symlink_to("foreword-1-step-3-looping.jsonl.gz")
    (tmp_path / "foreword-1-step-4-folder.jsonl.gz").mkdir()
    os.mkfifo(tmp_path / "foreword-1-step-5-pipe.jsonl.gz")
    assert report([], {}, tmp_path)["last_failed_steps"] == []
    failed_steps(tmp_path / "foreword-1-step-6-x.jsonl.gz")
    assert len(report([], {}, tmp_path)["last_failed_steps"]) == 2


def test_failed_steps_that_were_deleted_or_cannot_be_read_are_none(tmp_path, monkeypatch):
    failed_steps(tmp_path / "foreword-1-step-2-x.jsonl.gz")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("foreword.trace.reader.Trace.read", refuse)
    assert report([], {}, tmp_path)["last_failed_steps"] == []


def test_a_folder_that_a_variable_names_is_shown_as_the_variable(tmp_path, monkeypatch):
    for name in ("FOREWORD_HOME", "XDG_CACHE_HOME"):
        path = f"{tmp_path}/{SECRET}"
        made = report([Finding("model", f"{path}/model")], {name: path}, tmp_path)
        assert made["findings"][0]["value"] == f"${name}/model"
    monkeypatch.setenv("HOME", str(tmp_path))
    made = report([Finding("model", f"{tmp_path}/{SECRET}/model")], {"FOREWORD_HOME": f"~/{SECRET}"}, tmp_path)
    assert made["findings"][0]["value"] == "$FOREWORD_HOME/model"


def test_the_command_prints_it(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["doctor", "--quick", "--report"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["last_failed_steps"] == []
