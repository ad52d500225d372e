"""`foreword shadow`: a command that starts vLLM, with the check of its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from foreword.check_options import VARIABLE, CheckOptions
from foreword.errors import ConfigError


def shadow(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="What starts vLLM, such as: vllm serve MODEL.")
    ],
    check: Annotated[
        str,
        typer.Option(
            help="host (values that are on the host), tensors (all of them) or full (also what each slot of the cache "
            "holds); then, separated by commas, sample:N (each N-th step), first:K (findings that are logged), raise."
        ),
    ] = "full",
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:SIZE]", help="Write the steps as a trace, of a limited size (docs/conformance.md)."
        ),
    ] = None,
) -> None:
    """Start vLLM with a check of each step that it prepares, and report what is wrong.

    The command is run with FOREWORD_CHECK set; what was checked and found is printed at its end. Foreword must be
    installed in the environment of that vLLM. The exit status is that of the command.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report"
        words = [check, *([f"record:{Path(record).absolute()}"] if record else []), f"report:{report}"]
        options = CheckOptions.of(",".join(words))
        if options is None or options.report != report:
            raise ConfigError(f"--check {check!r:.80}: the report is kept by this command; leave it out")
        status = _run(command, {**os.environ, VARIABLE: ",".join(words)})
        if report.exists():
            print(report.read_text(), end="")
        else:
            print("foreword: no step was checked: is Foreword installed where vLLM is?")
    raise typer.Exit(status if status >= 0 else 128 - status)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command to its end and return its status. Signals that ask this process to end are passed on."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came while the process was being started

    def pass_on(number: int, _: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    kept = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(command, env=environment)
        for number in early:
            process.send_signal(number)
        return process.wait()
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started ({error.strerror})") from None
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
