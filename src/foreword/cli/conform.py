"""`foreword conform`: hold another engine's steps, or our own, against the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def conform(
    trace: Annotated[
        Path | None, typer.Argument(help="A JSON-lines trace (docs/conformance.md); none: the vectors that ship.")
    ] = None,
) -> None:
    """Replay a trace of steps and report every difference. Exit status 1 if there is one."""
    from foreword.insight import conform as kit

    report = kit.run(trace)
    print(report)
    if not report.ok:
        raise typer.Exit(1)
