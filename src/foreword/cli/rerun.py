"""`foreword rerun`: a trace again on the runner of another engine, without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.terminal import note
from foreword.errors import ConfigError
from foreword.trace.reader import Trace

ENGINES = ("vllm",)


def rerun(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace (docs/conformance.md).")],
    engine: Annotated[str, typer.Option(help="Whose runner: vllm, which must be installed here.")] = "vllm",
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="The only tensor that counts; default: any.")
    ] = None,
    print_test: Annotated[
        bool, typer.Option("--as-test", help="Print a file for pytest that needs the engine alone.")
    ] = False,
) -> None:
    """Give the recorded decisions to the engine's own runner, and compare what it prepares.

    The runner has no model, and its samples are those recorded. Exit status 1 if a tensor is not as defined.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r:.80}: must be one of {', '.join(ENGINES)}", param_hint="--engine")
    if tensor is not None and print_test:
        raise typer.BadParameter("the test has all that is wrong; leave it out", param_hint="--tensor")
    trace = Trace.read(file)
    try:
        from foreword.vllm import rerun as of_vllm  # it imports vLLM
    except ImportError as error:
        raise ConfigError(f"--engine vllm: vLLM cannot be imported here ({error}). Run this where vLLM is") from None
    if trace.damage is not None:
        note(f"{trace.damage}; what comes before it is used")
    if print_test:
        print(of_vllm.as_test(trace), end="")
        return
    report = of_vllm.rerun(trace, tensor=tensor)
    print(f"{file}: {report}")
    raise typer.Exit(0 if report.ok else 1)
