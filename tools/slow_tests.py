"""Runs tests as on a machine that is busy with other work: their processes are stopped most of the time.

    python tools/slow_tests.py tests/server --slower 5        or: make slow-tests TESTS="tests/server --slower 5"

At random moments all processes of the tests, or some of them, are stopped for a while. A test that fails only here
depends on the clock. Other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

RUNNING = 0.05, 0.4  # seconds between two stops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=5.0, help="time with stops per time without")
    parser.add_argument("--seed", type=int, default=0)
    given, arguments = parser.parse_known_args()
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments])
    random, stopped = Random(given.seed), list[int]()
    try:
        while tests.poll() is None:
            running = random.uniform(*RUNNING)
            time.sleep(running)
            share = random.choice((0.5, 1.0, 1.0))
            stopped = [pid for pid in family(tests.pid) if random.random() <= share and state_of(pid) not in "TZ"]
            send(signal.SIGSTOP, stopped)
            time.sleep(running * random.uniform(0, 2 * (given.slower - 1)))
            send(signal.SIGCONT, stopped)
    finally:
        send(signal.SIGCONT, stopped)
        tests.wait()
    sys.exit(tests.returncode)


def family(pid: int) -> list[int]:
    """Return a process and all that it and they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def state_of(pid: int) -> str:
    """Return the letter of a process's state; a test may have stopped it, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
