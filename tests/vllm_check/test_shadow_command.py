"""`foreword shadow` around a command that stands for vLLM."""

import signal
import subprocess
import sys
import time

FOREWORD = [sys.executable, "-m", "foreword"]
REPORTS = """
import os
words = os.environ["FOREWORD_CHECK"].split(",")
print(words[:-1], flush=True)
open(words[-1].removeprefix("report:"), "w").write("the report\\n")
"""


def shadow(*options, code=REPORTS):
    command = [*FOREWORD, "shadow", *options, "--", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_runs_with_the_variable_and_its_report_comes_last(tmp_path):
    done = shadow("--check", "tensors,sample:10", "--record", str(tmp_path / "steps.jsonl:1MB"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"['tensors', 'sample:10', 'record:{tmp_path}/steps.jsonl:1MB']", "the report"]


def test_the_exit_status_is_that_of_the_command():
    done = shadow(code="import sys; sys.exit(3)")
    assert done.returncode == 3
    assert "no step was checked" in done.stdout


def test_wrong_options_are_refused_before_the_command_starts():
    for options in (["--check", "fast"], ["--check", "off"], ["--check", "full,report:r"]):
        done = shadow(*options)
        assert (done.returncode, done.stdout) == (2, ""), options
    done = subprocess.run([*FOREWORD, "shadow", "--", "/no/such/program"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "/no/such/program: cannot be started" in done.stderr


def test_a_signal_reaches_the_command():
    code = REPORTS + "import time\ntime.sleep(60)"
    command = [*FOREWORD, "shadow", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("['full'")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert rest == "the report\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_the_variable_of_the_check_is_refused_by_no_command():
    environment = {"FOREWORD_CHECK": "full", "PYTHONPATH": ":".join(sys.path)}
    command = [*FOREWORD, "explain", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
