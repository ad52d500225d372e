"""Results of benchmarks are files of one form, and the tables of docs/benchmarks.md are computed from them."""

import json
import re
import shutil
import subprocess
import sys

import pytest

import benchmark_results
from benchmark_results import FOLDER, Run, measured, newest, read
from docpages.benchmarks import COMPARISONS, FIGURES, ratio, ratios


def a_run(machine="one", date="2026-01-02", results=({"a": 1},), question="engines"):
    return Run(question, machine, "a processor", date, None, "a command", "", list(results))


def test_every_file_is_in_the_form_in_which_runs_are_saved():
    paths = sorted(FOLDER.glob("*"))
    assert len(paths) == len(read()) > 20
    for path, run in zip(paths, read(), strict=True):
        assert path.name == run.file_name
        assert path.read_text(encoding="utf-8") == run.text()


def git(*words):
    return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false",
    reason="needs the history",
)
def test_results_name_a_commit_of_the_history():
    history = {commit[:12] for commit in git("rev-list", "HEAD").stdout.split()}
    commits = {run.commit.removesuffix("-changed") for run in read() if run.commit is not None}
    assert commits
    assert commits <= history


def test_a_command_is_run_and_its_lines_of_json_are_the_results():
    code = "print('a title'); print('{\"step_us\": 1.5}'); print('{\"step_us\": 2}')"
    run = measured("loop", "", "a note", [sys.executable, "-c", code])
    assert run.results == [{"step_us": 1.5}, {"step_us": 2}]
    assert run.machine == run.processor
    assert re.fullmatch(r"[0-9a-f]{12}(-changed)?", run.commit)
    assert Run(**json.loads(run.text())) == run


@pytest.mark.parametrize(("question", "code"), [("loop", "print('no JSON')"), ("lop", "print('{}')")])
def test_what_is_no_result_is_refused(question, code):
    with pytest.raises(ValueError, match=r"the command printed no results|question 'lop': must be of engines"):
        measured(question, "", "", [sys.executable, "-c", code])


def test_the_newest_run_of_a_machine_replaces_the_earlier_ones(tmp_path):
    for run in (a_run(), a_run("two"), a_run(date="2025-12-31"), a_run(date="2026-01-03", results=[{"a": 2}])):
        (tmp_path / run.file_name).write_text(run.text(), encoding="utf-8")
    found = {run.machine: run.date for run in newest(benchmark_results.read(tmp_path), "engines")}
    assert found == {"one": "2026-01-03", "two": "2026-01-02"}
    assert newest(benchmark_results.read(tmp_path), "host") == []


def rows(engine, weights, **figures):
    names = {name.replace(" ", "_"): name for name in FIGURES}
    return [
        {"engine": engine, "weights": weights, "workload": names[w], FIGURES[names[w]]: value}
        for w, value in figures.items()
    ]


RESULTS = [
    *rows("foreword", "int8/int8", W1=90, W2=50, W7_again=2.0),
    *rows("foreword", "int8/int8/preallocated", W1=100, W7_again=3.0),
    *rows("foreword", "auto", W1=30),
    *rows("foreword-transformers", "int8", W1=1000),
    *rows("one", "q8_0", W1=40, W7_again=6.0),
    *rows("two", "w8a8", W1=50, W2=10, W7_again=9.0),
    *rows("two", "w8a8", W1=45),
    *rows("two", "bf16", W1=60),
]


def test_a_ratio_is_over_the_best_other_engine_with_weights_of_the_width():
    run = a_run(results=RESULTS)
    assert ratio(run, COMPARISONS["8-bit"], "W1") == 2.0
    assert ratio(run, COMPARISONS["8-bit"], "W7 again") == 2.0  # fewer seconds are better
    assert ratio(run, COMPARISONS["8-bit"], "W2") is None  # not measured with the weights that count
    assert ratio(run, COMPARISONS["bf16"], "W1") is None
    assert ratio(run, COMPARISONS["default"], "W1") == 0.5  # over any weights


def test_a_machine_without_figures_of_a_width_is_in_no_table_of_it():
    assert list(ratios([a_run(results=RESULTS), a_run("two", results=rows("two", "bf16", W1=3))], "8-bit")) == ["one"]
