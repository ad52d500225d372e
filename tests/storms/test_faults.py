"""Host callables that raise at one of their calls, in a process of their own: a violation may leave threads that hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "fault_storm.py"


def test_a_callable_that_raises_harms_no_request_but_its_own():
    command = [sys.executable, str(PROGRAM), "--runs", "1", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
