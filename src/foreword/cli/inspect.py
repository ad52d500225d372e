"""`foreword inspect`: a trace as a page to look at, or as a timeline for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.terminal import note
from foreword.insight.page import write_page
from foreword.insight.perfetto import write_timeline
from foreword.insight.shown import TextOf
from foreword.trace.reader import TraceReader


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace (docs/conformance.md).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a page of HTML: steps, tensors, requests and blocks.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write trace events as JSON, which ui.perfetto.dev shows.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Show the texts of tokens on the page, by this model's tokenizer."),
    ] = None,
) -> None:
    """Show a trace: a page of its steps with every tensor, its requests and its blocks, or a timeline.

    A damaged file is shown up to the damage, and the exit status is 1.
    """
    if out is None and perfetto is None:
        raise typer.BadParameter("give a file for the page, or --perfetto FILE.", param_hint="--out")
    if model is not None and out is None:
        raise typer.BadParameter("is for the page: give --out too", param_hint="--model")
    damage = None
    if out is not None:
        shown = write_page(file, out, text_of=None if model is None else _texts(file, model))
        damage = shown.damage
        print(f"{out}: {shown}")
    if perfetto is not None:
        timeline = write_timeline(file, perfetto)
        damage = damage or timeline.damage
        print(f"{perfetto}: {timeline}")
    if damage is not None:
        note(f"{damage}; what comes before it is shown")
        raise typer.Exit(1)


def _texts(file: Path, model: str) -> TextOf:
    """Return the texts of token ids. BadParameter for a trace that has none."""
    how = TraceReader(file).header.token_ids
    if how != "plain":
        raise typer.BadParameter(f"the token ids of {file} are {how}, so they have no texts", param_hint="--model")
    from foreword.insight.token_text import text_of  # only texts need a tokenizer
    from foreword.models.loader import load_model

    return text_of(load_model(model).tokenizer)
