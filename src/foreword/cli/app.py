"""The `foreword` command. A subcommand's module, and all that it imports, is loaded when the subcommand runs."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from foreword import __version__
from foreword.cli.examples import epilog
from foreword.collector import without_collections
from foreword.errors import ConfigError, ForewordError
from foreword.names import advice, nearest

COMMANDS = {
    "run": "Generate an answer with a real model on this machine's CPU.",
    "chat": "Talk with a model; it remembers the conversation.",
    "batch": "Answer a file of requests in OpenAI's batch format.",
    "embed": "Print the embedding of each text as JSON, one per line.",
    "serve": "Serve models to clients of OpenAI, Anthropic and Ollama over HTTP.",
    "explain": "Show what a step prepares: which tokens, at which positions, from which rows, into which slots.",
    "tour": "Learn what happens in a step: eight short lessons on the real library, each with an exercise.",
    "simulate": "Predict latencies, cache hits, preemptions and costs of a recorded load, per policy and router.",
    "calibrate": "Time real steps of many shapes, fit a linear cost model and save it.",
    "conform": "Replay traces of steps and report every difference. Exit status 1 if there is one.",
    "replay": "Replay a trace: every tensor of every step on a backend, or with --model its outputs.",
    "inspect": "Show a trace: a page of its steps with every tensor, its requests and its blocks, or a timeline.",
    "shrink": "Shrink a trace to the few requests and steps that still show a fault.",
    "rerun": "Give the recorded decisions to the engine's own runner, and compare what it prepares.",
    "fuzz": "Search a running server for silent faults of its prefix cache. Exit status 1 if one is found.",
    "shadow": "Start vLLM with a check of each step that it prepares, and report what is wrong.",
    "migrate": "Translate the command line of another engine's server into one of `foreword serve`.",
    "models": "List, search, download, describe or remove models.",
    "doctor": "Show what the engine finds on this machine, what slows it down, and the fix.",
    "bench": "Measure the input layer and the whole engine.",
}
"""Module of `foreword.cli`, with a function or `typer.Typer` of the same name → the first line of its help."""

NO_SUCH_OPTION: type[Exception] = import_module(typer.BadParameter.__module__).NoSuchOption
"""The exception that Typer raises: that of Click or, in later versions, that of Typer's copy of Click."""


def variable_path(ctx: Any) -> str:
    """Return the beginning of the names of variables for a command's options: FOREWORD_BENCH_HOST."""
    words: list[str] = []
    while ctx.parent is not None:
        words, ctx = [ctx.info_name, *words], ctx.parent
    return "_".join(["FOREWORD", *words]).upper()


def option_names(command: Any) -> dict[str, Any]:
    """Return name → parameter of the options of a command. The name is that of the flag: ``max_num_seqs``."""
    options = [one for one in command.params if one.param_type_name == "option"]
    return {max(one.opts, key=len)[2:].replace("-", "_"): one for one in options}


VALUES = {
    "str": " TEXT", "path": " FILE", "int range": " N", "float range": " X", "list[str]": "", "list[Path]": "",
}  # fmt: skip
"""Typer's name of a type → the name of its values in help, as in the tables of settings."""


class Command(TyperCommand):
    """A command whose help lists its options under their headings, with names and values in full."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raise ConfigError for a variable of an option that it does not have, or of no command;
        BadParameter for NaN, which older versions of Typer find within any limits.
        """
        _check_variables(option_names(self), variable_path(ctx), f"`{ctx.command_path} --help` lists the options.")
        for option in self.params:
            value = ctx.params.get(option.name)
            if isinstance(option, TyperOption) and isinstance(value, float) and math.isnan(value):
                raise typer.BadParameter("nan is not a number", ctx=ctx, param=option)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            heading = one.rich_help_panel if isinstance(one, TyperArgument | TyperOption) else None
            if (record := one.get_help_record(ctx)) is not None:
                heading = str(heading or f"{one.param_type_name.title()}s")
                form = record[0]
                for kind, name in VALUES.items():
                    form = form.replace(f" <{kind}>", "" if one.param_type_name == "argument" else name)
                headings.setdefault(heading, []).append((form, record[1]))
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)


VARIABLES = ("FOREWORD_CHECK", "FOREWORD_HOME", "FOREWORD_ISA", "FOREWORD_NUM_THREADS")
"""Variables of the environment that belong to no command."""

_OF_SERVICES = re.compile(
    r"FOREWORD(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)_\w+)=.*|\w+=(tcp|udp|sctp)://.*"
)
"""Variables that Kubernetes makes of the names of services, such as one named foreword, with their values."""


def _check_variables(names: Mapping[str, Any], path: str, otherwise: str) -> None:
    """Raise ConfigError for a variable that begins with FOREWORD_ and that neither this command, with these options,
    nor another one has.

    path: what the command's variables begin with, such as FOREWORD_BENCH_HOST.
    """
    others = tuple(f"FOREWORD_{name}_".upper() for name in COMMANDS)
    for variable, value in os.environ.items():
        own = variable.removeprefix(f"{path}_") if variable.startswith(f"{path}_") else None
        if own is not None and own.lower() not in names:
            fix = advice(own, names, otherwise, form=lambda name: f"{path}_{name}".upper())
            raise ConfigError(f"{variable}: no such option. {fix}")
        if own is not None and not value:
            raise ConfigError(f"{variable}: is empty. Give a value, or leave the variable out")
        if own is not None or not variable.startswith("FOREWORD_") or variable in VARIABLES:
            continue
        if not variable.startswith(others) and not _OF_SERVICES.fullmatch(f"{variable}={value}"):
            word, _, rest = variable.removeprefix("FOREWORD_").lower().partition("_")
            known = {name.removeprefix("FOREWORD_").lower() for name in VARIABLES}
            known |= {f"{command}_{rest}" for command in [nearest(word, COMMANDS)] if command and rest}
            begins = "Those of a command begin with its name, such as FOREWORD_RUN_MODEL."
            fix = advice(f"{word}_{rest}", known, begins, form=lambda name: f"FOREWORD_{name}".upper())
            raise ConfigError(f"{variable}: no such variable. {fix}")


def _lines_of(variable: str, context: Any) -> list[str] | None:
    """Return the values of a repeatable option in a variable: a line each, so that a value may have spaces."""
    text = os.environ.get(variable)
    return text.split("\n") if text else None


class _Program(TyperGroup):
    """All commands. The error for an unknown option of another program gives its name in Foreword."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NO_SUCH_OPTION as error:
            _explain(error, ctx.meta["words"])
            raise


def _explain(error: Any, words: list[str]) -> None:
    """Add advice to the error for an option that does not exist."""
    name: str = error.option_name
    if not name.startswith("--"):  # the first letter of a word such as -ngl
        name = next((word for word in words if word[:1] == "-" != word[1:2] and name[1:] in word), name)
    known = {
        flag[2:].replace("-", "_") for one in error.ctx.command.get_params(error.ctx)
        for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")
    }  # fmt: skip
    fix = advice(name, known, f"`{error.ctx.command_path} --help` lists the options.", form=flag_of)
    error.message, error.possibilities = f"No such option: {name}. {fix}", None


def flag_of(name: str) -> str:
    """Return the flag of an option's name: ``max_num_seqs``, "--max-num-seqs"."""
    return f"--{name.replace('_', '-')}"


app = typer.Typer(
    name="foreword",
    cls=_Program,
    help="What comes before the forward pass of an LLM, and a small engine around it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    epilog=epilog(""),
)


class _LazyCommand(TyperCommand):
    """Name and help of a subcommand, replaced by the real one when it runs.

    Importing all subcommands takes four times as long as `foreword --help` does without them.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with without_collections():
            context = real_command(str(self.name)).make_context(info_name, args, parent, **extra)
            gc.freeze()  # collections during the command do not visit the modules, which stay
            context.call_on_close(gc.unfreeze)
        return context


@cache  # Typer reads the signature of a command in 40 ms, and a process may run many
def real_command(name: str) -> Any:
    """Return the command of a module of `foreword.cli`: each option has its variable, each command its examples."""
    command = getattr(import_module(f"foreword.cli.{name}"), name)
    if not isinstance(command, typer.Typer):
        single = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
        single.command(name, cls=Command)(command)
        command = single
    real = typer.main.get_command(command)
    parts = {f"{name} {word}": part for word, part in getattr(real, "commands", {}).items()}
    for words, part in {name: real, **parts}.items():
        part.epilog = epilog(words)
        part.short_help = (part.help or "").partition("\n\n")[0]  # whole: click cuts what it takes from the help
        path = f"FOREWORD_{words}".replace(" ", "_").upper()
        for option, parameter in option_names(part).items():
            parameter.envvar = f"{path}_{option}".upper()
            parameter.show_envvar = False
            if parameter.multiple:
                parameter.value_from_envvar = partial(_lines_of, parameter.envvar)
    return real


for _name, _help in COMMANDS.items():
    app.command(_name, cls=_LazyCommand, short_help=_help)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foreword {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
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
    # A stream that whoever started the process has closed is None.
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):  # text that the terminal cannot show does not fail
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except ForewordError as error:
        from foreword.cli.wording import of_command  # only failures need it

        _fail(of_command(error), 2)
    except (OSError, MemoryError) as error:
        sys.stdout = None  # a failed write is not tried again at the exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        _fail(str(error) or "not enough memory", 1)
    except SystemExit as end:
        if end.code == 130:
            _fail("interrupted", 130)
        raise


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # it stays open as long as the process runs


def _fail(reason: object, status: int) -> NoReturn:
    print("foreword:", *str(reason).split(), file=sys.stderr)
    sys.exit(status)
