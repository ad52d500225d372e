"""The test that decides whether a trace fails, which users give as a command or as a function, module:name."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from foreword.errors import ConfigError, reason_of
from foreword.plugins import load_plugin
from foreword.trace.project import num_steps
from foreword.trace.reader import Trace
from foreword.trace.shrink import Failing
from foreword.trace.writer import TraceWriter

FAILS = 1
"""The exit status of a command for a trace that fails."""


def failing_of(text: str) -> Failing:
    """Return the test of "module:name" or of a command. Raise ConfigError if there is none.

    A function gets the `Trace` and returns whether it fails, or the first step, counted from 0, that shows it. A
    command gets the name of a file in place of {}, or at its end, and has exit status 1 if the trace fails.
    """
    return function_of(text) if is_function(text) else command_of(text)


def is_function(text: str) -> bool:
    """Return whether the text names a function rather than a command."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text) is not None


def function_of(name: str) -> Failing:
    """Return the test of "module:name"."""
    try:
        function = load_plugin("predicates", name)
    except ValueError as error:
        raise ConfigError(f"failing={name!r}: {error}") from None
    if not callable(function):
        raise ConfigError(f"failing={name!r}: must be a function of a trace")

    def failing(trace: Trace) -> int | None:
        found = function(trace)
        return num_steps(trace.events) - 1 if found is True else None if found is False or found is None else int(found)

    return failing


def command_of(command: str) -> Failing:
    """Return the test of a command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"failing={command!r}: is not a command ({error})") from None
    if not words:
        raise ConfigError("failing='': give a command, or module:name")
    if "{}" not in words:
        words.append("{}")

    def failing(trace: Trace) -> int | None:
        with tempfile.TemporaryDirectory(prefix="foreword-") as folder:
            path = Path(folder) / "steps.jsonl"
            write_trace(path, trace)
            given = [str(path) if word == "{}" else word for word in words]
            try:
                done = subprocess.run(given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
            except OSError as error:
                raise ConfigError(f"failing={command!r}: cannot be run ({reason_of(error)})") from None
        return num_steps(trace.events) - 1 if done.returncode == FAILS else None

    return failing


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace to a file."""
    with TraceWriter(path, trace.header) as writer:
        for event in trace.events:
            writer.write(event)


_OF_TENSORS = """
from foreword.insight import conform


def test_the_recorded_tensors_are_as_defined(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(TRACE)
    report = conform.run(path)
    assert report.ok, str(report)
"""
_OF_FUNCTION = """
from {module} import {name}

from foreword.insight import Trace


def test_the_steps_do_not_fail(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(TRACE)
    found = {name}(Trace.read(path))
    assert found is None or found is False
"""
_OF_COMMAND = """
import subprocess


def test_the_steps_do_not_fail(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(TRACE)
    words = {words!r}
    assert subprocess.run([str(path) if word == "{{}}" else word for word in words]).returncode != {fails}
"""


def as_test(trace: Trace, failing: str | None) -> str:
    """Return the text of a test for pytest that contains a trace and fails as long as the fault exists.

    failing: the text of the test; None: the test is whether a recorded tensor differs.
    """
    if failing is None:
        head = _OF_TENSORS
    elif is_function(failing):
        module, _, name = failing.partition(":")
        head = _OF_FUNCTION.format(module=module, name=name)
    else:
        words = shlex.split(failing)
        head = _OF_COMMAND.format(words=words if "{}" in words else [*words, "{}"], fails=FAILS)
    with tempfile.TemporaryDirectory(prefix="foreword-") as folder:
        path = Path(folder) / "steps.jsonl"
        write_trace(path, trace)
        lines = path.read_text(encoding="utf-8")
    imports, _, body = head.lstrip().partition("\n\n\n")
    return f'"""Recorded steps that showed a fault."""\n\n{imports}\n\nTRACE = r"""{_quoted(lines)}"""\n\n\n{body}'


def _quoted(lines: str) -> str:
    """Return the lines of a trace inside of a raw string: JSON can write a quotation mark as an escape."""
    return lines.replace('"""', '""\\u0022').rstrip("\n") + "\n"
