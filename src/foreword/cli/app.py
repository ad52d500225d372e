"""The `foreword` command. A subcommand's module, and all that it imports, is loaded when the subcommand runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from foreword.errors import ForewordError

COMMANDS = {
    "run": "Generate an answer with a real model on this machine's CPU.",
    "explain": "Show what a step prepares: which tokens, at which positions, from which rows, into which slots.",
    "simulate": "Predict latencies, preemptions, cache hits and memory use of a recorded load, per policy.",
    "calibrate": "Time real steps of many shapes, fit a linear cost model and save it.",
    "conform": "Replay traces of steps and report every difference. Exit status 1 if there is one.",
    "models": "List the models known by name, or download one.",
    "bench": "Measure the input layer, the kernels and the whole engine.",
}
"""Module of `foreword.cli`, with a function or `typer.Typer` of the same name → the first line of its help."""

app = typer.Typer(
    name="foreword",
    help="What comes before the forward pass of an LLM, and a small engine around it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class _LazyCommand(TyperCommand):
    """Name and help of a subcommand, replaced by the real one when it runs.

    Importing all subcommands takes four times as long as `foreword --help` does without them.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        name = str(self.name)
        command = getattr(import_module(f"foreword.cli.{name}"), name)
        if not isinstance(command, typer.Typer):
            single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            single.command(name)(command)
            command = single
        return typer.main.get_command(command).make_context(info_name, args, parent, **extra)


for _name, _help in COMMANDS.items():
    app.command(_name, cls=_LazyCommand, help=_help)(lambda: None)


def main() -> None:
    """Run `foreword`. A `ForewordError` is printed as one line with exit status 2, not as a traceback."""
    try:
        app()
    except ForewordError as error:
        print(f"foreword: {error}", file=sys.stderr)
        sys.exit(2)
