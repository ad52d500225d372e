"""Values and files that no command can use: the answer is one error, never a traceback."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import bad_values
import pytest
import typer
from bad_values import options
from typer.testing import CliRunner

import foreword
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.cli.app import COMMANDS, app
from foreword.engine.config import EngineConfig
from foreword.settings import settings_of

WORKS = {
    "run": ["Hi", "--model", "none.gguf"],
    "chat": ["--model", "none.gguf"],
    "serve": ["none.gguf"],
    "batch": ["trace.jsonl", "out.jsonl", "--model", "none.gguf"],
    "embed": ["Hi", "--model", "none.gguf"],
    "calibrate": ["none.gguf"],
    "simulate": ["--trace", "trace.jsonl"],
    "fuzz": ["http://127.0.0.1:1"],
    "replay": ["trace.jsonl"],
}
"""Arguments that each command needs, with a model that does not exist: what passes the checks ends at the model."""

FREE = (
    {
        (command, f"--{row.name.replace('_', '-')}", value)
        for command in ("run", "chat")
        for row in PARAMETERS
        for value in ("-1", "9" * 20)
        if row.type in ("int", "float") and row.refusal(int(value)) is None
    }
    | {("explain", "--null-block", "-1")}
    | {
        (command, f"--{row.name.replace('_', '-')}", "-1")
        for command in (
            *("run", "chat", "batch", "embed", "serve"),
            *(f"bench {name}" for name in ("throughput", "latency", "prefill", "startup")),
        )
        for row in settings_of(EngineConfig).values()
        if row.kind.is_number and row.refusal(-1) is None
    }
)
"""Values that are valid after all, by the tables of sampling parameters and of settings."""


def commands():
    """Words of a command → its function."""
    for name in COMMANDS:
        command = getattr(import_module(f"foreword.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            for info in command.registered_commands:
                yield f"{name} {info.name or info.callback.__name__}", info.callback
        else:
            yield name, command


def numbers():
    """(command, option, value) for each option that takes a number, and values that are none or out of any range."""
    return [found for found in bad_values.numbers(commands()) if found not in FREE]


def test_every_command_with_numbers_is_tried():
    benchmarks = ("host", "throughput", "latency", "prefill", "startup")
    of_model = {"run", "chat", "batch", "embed", "serve", "calibrate", "models search", "models recommend"}
    others = {"explain", "simulate", "doctor", "fuzz", "replay"}
    assert {words for words, _, _ in numbers()} == {f"bench {name}" for name in benchmarks} | of_model | others


@pytest.mark.one_in(9)
@pytest.mark.parametrize("words", sorted({words for words, _, _ in numbers()}))
def test_a_number_out_of_range_is_refused_with_the_name_of_its_option(run_here, tmp_path, words):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 3}\n')
    tried = [found for found in numbers() if found[0] == words]
    bad_values.assert_refused(lambda *given: run_here(*given)[::2], words.split(), WORKS.get(words, []), tried)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [*command, "--model", model]
            for command in (["run", "Hi"], ["chat"], ["batch", "trace.jsonl", "-"], ["bench", "latency"])
            for model in (
                "",
                ".",
                "missing.gguf",
                "missing/",
                "a/b/c",
                "binary.gguf",
                "../..",
                "x" * 300,
                "\udcff",
                "é",
            )
        ),
        ["bench", "startup", "--model", "missing.gguf"],
        ["calibrate", "missing.gguf"],
        ["calibrate", "missing.gguf", "--out", "."],
        ["calibrate", "missing.gguf", "--out", "missing/cost.json"],
        ["bench", "throughput", "--workloads", ""],
        *(["explain", "--prompts", text] for text in ("", "x", "-1", "0", "12", "1,,2", "9" * 5000, "1.5")),
        ["explain", "--token", "99"],
        *(
            ["simulate", "--trace", trace]
            for trace in ("", ".", "missing", "binary.csv", "binary.jsonl", "empty.csv", "empty.jsonl", "x" * 300)
        ),
        *(
            ["simulate", "--trace", "trace.jsonl", "--cost", cost]
            for cost in (".", "missing", "binary.csv", "empty.csv", "trace.jsonl")
        ),
        *(["simulate", "--trace", "trace.jsonl", "--policies", policies] for policies in ("", "x", "fcfs,")),
        ["simulate", "--trace", "trace.jsonl", "--num-blocks", "2", "--block-size", "4"],
        ["simulate", "--trace", "trace.jsonl", "--max-model-len", "1"],
        ["simulate", "--trace", "trace.jsonl", "--max-model-len", "10000000"],
        *(
            ["conform", trace]
            for trace in ("", ".", "missing", "binary.jsonl", "empty.jsonl", "trace.jsonl", "x" * 300)
        ),
        ["conform", "--backend", "torch"],
        *(["shrink", trace, "--as-test"] for trace in ("", ".", "missing", "binary.jsonl", "trace.jsonl")),
        ["shrink", "trace.jsonl"],
        ["shrink", "trace.jsonl", "--as-test", "--tensor", "x"],
        *(["models", "pull", name] for name in ("", "missing", "x" * 300, "../..", "\udcff")),
    ],
    ids=lambda arguments: " ".join(arguments)[:60].encode("ascii", "replace").decode(),
)
def test_a_value_or_file_that_cannot_be_used_is_refused(run_here, tmp_path, arguments):
    for name in ("binary.csv", "binary.jsonl", "binary.gguf"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 40)
    for name in ("empty.csv", "empty.jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 3}\n')
    status, _, error = run_here(*arguments)
    assert status == 2
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith(("foreword: ", "Error: ")), error
    assert len(last) < 1000


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_an_unknown_option_is_answered_with_the_nearest(run_here, words):
    known = next((option for option, *_ in options(dict(commands())[words])), "--help")
    status, _, error = run_here(*words.split(), known + "x")
    assert status == 2
    assert known in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('api_key = "s3cret"', "api_key: expected a list"),
        ('api_keys = ["s3cret"]', "api_keys: unknown setting. Did you mean 'api_key'"),
        ('admin_key = ["s3cret"]', "admin_key: expected a text that is not empty"),
        ('key_limit = ["s3cret"]', "key_limit: number 1: give a key and its limits"),
        ('api_kye = "s3cret"', "api_kye: unknown setting. Did you mean 'api_key'"),
        ('tls_pasword = "s3cret"', "tls_pasword: unknown setting"),
        ('hf_token = "s3cret"', "hf_token: unknown setting"),
        ('api-key = ["s3cret"]', "api-key: unknown setting"),
        ('APIKey1 = "s3cret"', "APIKey1: unknown setting"),
        ('[server]\napi_key = ["s3cret"]', "server: unknown setting"),
        ('key_limit = ["a share=s3cret"]', "key_limit: number 1: share: must be a number"),
        ('[[model]]\nmodel = "a"\napi_kye = "s3cret"', "model[0].api_kye: unknown setting"),
        ('[[model]]\nmodel = "a"\napi_key = "s3cret"', "model[0].api_key: unknown setting"),
    ],
)
def test_no_error_of_a_file_has_a_key(run_here, tmp_path, line, words):
    file = tmp_path / "serve.toml"
    file.write_text(line)
    status, printed, errors = run_here("serve", "--config", str(file))
    assert status
    assert words in errors
    assert "s3cret" not in errors + printed


def test_a_variable_of_no_option_is_refused(run_here, monkeypatch):
    monkeypatch.setenv("FOREWORD_EXPLAIN_BUDGT", "3")
    status, _, error = run_here("explain")
    assert (status, error) == (
        2,
        "foreword: FOREWORD_EXPLAIN_BUDGT: no such option. Did you mean 'FOREWORD_EXPLAIN_BUDGET'?\n",
    )
    assert run_here("explain", "--help")[0] == 0


@pytest.mark.parametrize(
    ("words", "name"), [("-ngl 99", "-ngl"), ("--max-tokens 2 -n 4", "-n"), ("--num-threads 2 -c 4", "-c")]
)
def test_an_unknown_letter_is_named_as_it_was_written(run_here, words, name):
    status, _, error = run_here("run", "x", *words.split())
    assert status == 2
    assert f"No such option: {name}. " in error


@pytest.mark.parametrize(
    ("failure", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "foreword: interrupted"),
        (OSError(28, "No space left on device"), 1, "foreword: [Errno 28] No space left on device"),
        (MemoryError("Unable to allocate 640 GiB"), 1, "foreword: Unable to allocate 640 GiB"),
        (MemoryError(), 1, "foreword: not enough memory"),
        (foreword.errors.ModelError("two\nlines"), 2, "foreword: two lines"),
    ],
)
def test_a_failure_ends_with_one_line_and_its_status(run_here, monkeypatch, failure, status, line):
    def fail(*arguments, **options):
        raise failure

    monkeypatch.setattr(import_module("foreword.cli.explain"), "toy_steps", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # main replaces it
    code, _, error = run_here("explain")
    assert (code, error.strip().splitlines()) == (status, [line])


def started(*arguments, **streams):
    source = str(Path(foreword.__file__).parents[1])
    command = [sys.executable, "-c", "from foreword.cli import main; main()", *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, stderr=subprocess.PIPE, **streams)


@pytest.mark.long
def test_a_reader_that_stops_reading_ends_the_command_in_silence():
    arguments = ["explain", "--json", "--max-model-len", "400", "--steps", "380"]  # more than a pipe holds
    with started(*arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, b"")


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_reported():
    with Path("/dev/full").open("w") as full, started("models", "list", "--json", stdout=full) as process:
        assert process.wait(60) == 1
        assert process.stderr.read() == b"foreword: [Errno 28] No space left on device\n"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("words", "status"), [(["models", "list"], 0), (["explain", "--token", "x"], 2)])
def test_streams_that_are_closed_do_not_change_the_exit_status(words, status):
    command = 'exec "$0" -c "from foreword.cli import main; main()" "$@" >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(Path(foreword.__file__).parents[1])}
    ended = subprocess.run(["sh", "-c", command, sys.executable, *words], env=environment, timeout=60)
    assert ended.returncode == status


@pytest.mark.long
def test_output_that_the_terminal_cannot_show_does_not_fail():
    with started("explain", stdout=subprocess.PIPE) as process:
        expected = process.communicate(timeout=60)[0].decode()
    os.environ["PYTHONIOENCODING"] = "ascii"
    try:
        with started("explain", stdout=subprocess.PIPE) as process:
            shown = process.communicate(timeout=60)[0].decode()
    finally:
        del os.environ["PYTHONIOENCODING"]
    assert shown == expected.encode("ascii", "backslashreplace").decode()


def test_the_version_is_shown():
    assert CliRunner().invoke(app, ["--version"]).output == f"foreword {foreword.__version__}\n"
