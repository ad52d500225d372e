"""A forked process is what a started one is: its status, signals, streams, folder, environment and arguments."""

import os
import signal
import subprocess
import sys

import pytest
from processes import Terminal, start

TELLS = """
import json, os, signal, sys
given = sys.stdin.read()
print(json.dumps([sys.argv, given, os.getcwd(), os.environ.get("OWN"), os.environ.get("OTHER"), __name__,
                  sys.stdout.isatty(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                  sorted(map(int, os.listdir("/proc/self/fd")))[:3]]))
print("told", file=sys.stderr)
sys.exit(3)
"""


def started(program, *arguments, **options):
    """A process that Python starts."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", program, *arguments], **streams, **options)


def test_it_has_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "of the test")
    outcomes = []
    for process in (
        start("a", "b c", program=TELLS, cwd=tmp_path, env={"OWN": "1"}),
        started(TELLS, "a", "b c", cwd=tmp_path, env={**os.environ, "OWN": "1"}),
    ):
        with process:
            outcomes.append((*process.communicate(b"input\n", timeout=60), process.returncode))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1:] == (b"told\n", 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_it(number):
    code = "import sys, time; print('ready', flush=True); time.sleep(60)"
    statuses = []
    for process in (start(program=code), started(code)):
        with process:
            assert process.stdout.readline() == b"ready\n"
            assert process.poll() is None
            process.send_signal(number)
            statuses.append((process.wait(60), process.stderr.read().count(b"KeyboardInterrupt")))
    assert statuses[0] == statuses[1] == (-number, number == signal.SIGINT)


def test_an_exception_is_told_and_processes_do_not_wait_for_each_other():
    with start(program="import time; time.sleep(60)") as waiting:
        with start(program="import atexit; atexit.register(print, 'end'); raise ValueError('none')") as process:
            out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, b"end\n")
        assert error.rstrip().endswith(b"ValueError: none")
        assert waiting.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.01)
        waiting.kill()


def test_it_controls_its_terminal():
    with Terminal("--version") as terminal:
        assert terminal.end() == 0
    assert "foreword" in terminal.plain
