"""Runs a storm in a process of its own, since damage may leave threads that hang."""

import subprocess
import sys
from pathlib import Path


def check_program(name: str, *arguments: str, timeout: float = 300) -> None:
    """Run a program of this folder; an assertion with its output unless it ends with 0."""
    command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
