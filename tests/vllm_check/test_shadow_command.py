"""`foreword shadow` around a command that stands for vLLM."""

import signal
import subprocess
import sys

from processes import run, start

REPORTS = """
import os
words = os.environ["FOREWORD_CHECK"].split(",")
with open(words[-1].removeprefix("report:"), "w") as file:
    file.write("the report\\n")
print(words[:-1], flush=True)
"""


def shadow(*options, code=REPORTS) -> tuple[int, str, str]:
    """Return the exit status, the output and standard error."""
    return run("shadow", *options, "--", sys.executable, "-c", code)


def test_the_command_runs_with_the_variable_and_its_report_comes_last(tmp_path):
    status, out, error = shadow("--check", "tensors,sample:10", "--record", str(tmp_path / "steps.jsonl:1MB"))
    assert status == 0, error
    assert out.splitlines() == [f"['tensors', 'sample:10', 'record:{tmp_path}/steps.jsonl:1MB']", "the report"]


def test_the_exit_status_is_that_of_the_command():
    status, out, _ = shadow(code="import sys; sys.exit(3)")
    assert status == 3
    assert "no step was checked" in out


def test_wrong_options_are_refused_before_the_command_starts():
    for options in (["--check", "fast"], ["--check", "off"], ["--check", "full,report:r"]):
        assert shadow(*options)[:2] == (2, ""), options
    status, _, error = run("shadow", "--", "/no/such/program")
    assert status == 2
    assert "/no/such/program: cannot be started" in error


def test_a_signal_reaches_the_command():
    code = REPORTS + "import time\ntime.sleep(60)"
    with start("shadow", "--", sys.executable, "-c", code, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline().startswith(b"['full'")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert rest == b"the report\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_the_variable_of_the_check_is_refused_by_no_command():
    status, _, error = run("explain", "--steps", "1", env={"FOREWORD_CHECK": "full"})
    assert status == 0, error
