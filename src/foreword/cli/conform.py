"""`foreword conform`: compare the steps of another engine, or the shipped traces, with the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from foreword.batch import Backend
from foreword.insight.conform import golden_vectors, run

BACKENDS = get_args(Backend)


def conform(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON-lines traces (docs/conformance.md); default: the traces that ship with Foreword."),
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, loops, numpy, native or device.")] = "auto",
) -> None:
    """Replay traces of steps and report every difference. Exit status 1 if there is one."""
    chosen = checked_backend(backend)
    reports = [run(path, backend=chosen, strict=False) for path in traces or golden_vectors()]
    for report in reports:
        print(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def checked_backend(name: str) -> Backend:
    """Return a backend by its name. Raise BadParameter for another one."""
    if name not in BACKENDS:
        raise typer.BadParameter(f"{name!r}: must be one of {', '.join(BACKENDS)}", param_hint="--backend")
    return cast(Backend, name)
