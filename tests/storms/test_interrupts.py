"""Interrupts at random moments, in a process of its own: a violation may leave threads that hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "interrupt_storm.py"


@pytest.mark.parametrize(
    ("mode", "runs"),
    [("lines", 40), ("planner", 15), ("signals", 20), ("burst", 10), ("thread", 10), ("steps", 40)],
)
def test_an_interrupt_at_any_moment_leaves_the_engine_as_before_a_step_or_after_it(mode: str, runs: int):
    command = [sys.executable, str(PROGRAM), "--modes", mode, "--runs", str(runs), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
