"""The environment of commands, and commands in the process of the test."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from foreword.cli import main


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the tests' own terminal, and what chats kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@contextmanager
def standard_input(content: bytes) -> Iterator[None]:
    """Within the block, standard input is a file with this content."""
    before, descriptor = sys.stdin, os.dup(0)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        os.dup2(file.fileno(), 0)
        try:
            with open(0, encoding="utf-8", closefd=False) as sys.stdin:
                yield
        finally:
            sys.stdin = before
            os.dup2(descriptor, 0)
            os.close(descriptor)


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `foreword` with these arguments in an empty folder. Return exit status, output and standard error.

    input: what standard input, a file, has. env: more variables. A process of its own takes half a second of CPU time:
    it is for pipes, terminals and signals.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else the program is named `python -m pytest`

    def call(*arguments: object, input: bytes = b"", env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, standard_input(input):
            patch.setattr(sys, "argv", ["foreword", *map(str, arguments)])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main()
        return end.value.code or 0, *capsys.readouterr()

    return call
