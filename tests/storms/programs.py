"""Runs a storm in a process of its own, since damage may leave threads that hang."""

from pathlib import Path
from subprocess import TimeoutExpired

from processes import start

RUN = """
import os, runpy, sys
path = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(path)
runpy.run_path(path, run_name="__main__")"""
"""A program of Python as `python FILE` runs it."""


def check_program(name: str, *arguments: str, timeout: float = 300) -> None:
    """Run a program of this folder; an assertion with its output unless it ends with 0."""
    with start(Path(__file__).parent / f"{name}.py", *arguments, program=RUN) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, out.decode()[-20000:] + error.decode()[-5000:]
