"""The `foreword` command. A subcommand's module, and all that it imports, is loaded when the subcommand runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from foreword import __version__
from foreword.cli.examples import epilog
from foreword.errors import ForewordError

COMMANDS = {
    "run": "Generate an answer with a real model on this machine's CPU.",
    "chat": "Talk with a model; it remembers the conversation.",
    "batch": "Answer a file of requests in OpenAI's batch format.",
    "embed": "Print the embedding of each text as JSON, one per line.",
    "serve": "Serve a model to OpenAI's clients over HTTP.",
    "explain": "Show what a step prepares: which tokens, at which positions, from which rows, into which slots.",
    "simulate": "Predict latencies, cache hits, preemptions and costs of a recorded load, per policy and router.",
    "calibrate": "Time real steps of many shapes, fit a linear cost model and save it.",
    "conform": "Replay traces of steps and report every difference. Exit status 1 if there is one.",
    "models": "List, download, describe or remove models.",
    "doctor": "Show what the engine finds on this machine, what slows it down, and the fix.",
    "bench": "Measure the input layer and the whole engine.",
}
"""Module of `foreword.cli`, with a function or `typer.Typer` of the same name → the first line of its help."""

app = typer.Typer(
    name="foreword",
    help="What comes before the forward pass of an LLM, and a small engine around it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    epilog=f"\b\n{epilog('')}",
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
        real = typer.main.get_command(command)
        real.epilog = epilog(name)
        for word, part in getattr(real, "commands", {}).items():
            part.epilog = epilog(f"{name} {word}")
        return real.make_context(info_name, args, parent, **extra)


for _name, _help in COMMANDS.items():
    app.command(_name, cls=_LazyCommand, short_help=_help)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foreword {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run `foreword` and exit."""
    run(app)


def run(program: typer.Typer) -> None:
    """Run a program and exit, after a failure with one line on standard error in place of a traceback.

    Exit status: 2 for a `ForewordError` and for wrong usage, 130 after an interrupt, 1 for other failures. If the
    reader of the output is gone, as in `foreword … | head`, nothing is printed.
    """
    for stream in (sys.stdout, sys.stderr):  # text that the terminal cannot show does not fail
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except ForewordError as error:
        _fail(error, 2)
    except (OSError, MemoryError) as error:
        sys.stdout = None  # what could not be written is not tried again at the exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        _fail(str(error) or "not enough memory", 1)
    except SystemExit as end:
        if end.code == 130:
            _fail("interrupted", 130)
        raise


def _fail(reason: object, status: int) -> NoReturn:
    print("foreword:", *str(reason).split(), file=sys.stderr)
    sys.exit(status)
