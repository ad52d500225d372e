"""`foreword conform`: hold another engine's steps, or our own, against the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from foreword.batch.prepare.inputs import Backend


def conform(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="JSON-lines traces (docs/conformance.md); none: the vectors that ship.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, loops, numpy or native.")] = "auto",
) -> None:
    """Replay traces of steps and report every difference. Exit status 1 if there is one."""
    from foreword.insight.conform import golden_vectors, run

    reports = [run(path, backend=_backend(backend)) for path in traces or golden_vectors()]
    for report in reports:
        print(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _backend(name: str) -> Backend:
    if name not in ("auto", "loops", "numpy", "native"):
        raise typer.BadParameter(f"{name!r}: must be auto, loops, numpy or native", param_hint="--backend")
    return cast(Backend, name)
