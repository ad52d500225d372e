"""`foreword inspect`: a trace as a page to look at, or as a timeline for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.terminal import note
from foreword.insight.page import write_page
from foreword.insight.perfetto import write_timeline


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace (docs/conformance.md).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a page of HTML: steps, tensors, requests and blocks.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write trace events as JSON, which ui.perfetto.dev shows.")
    ] = None,
) -> None:
    """Show a trace: a page of its steps with every tensor, its requests and its blocks, or a timeline.

    A damaged file is shown up to the damage, and the exit status is 1.
    """
    if out is None and perfetto is None:
        raise typer.BadParameter("give a file for the page, or --perfetto FILE.", param_hint="--out")
    damage = None
    if out is not None:
        shown = write_page(file, out)
        damage = shown.damage
        print(f"{out}: {shown}")
    if perfetto is not None:
        timeline = write_timeline(file, perfetto)
        damage = damage or timeline.damage
        print(f"{perfetto}: {timeline}")
    if damage is not None:
        note(f"{damage}; what comes before it is shown")
        raise typer.Exit(1)
