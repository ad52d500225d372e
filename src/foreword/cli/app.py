"""The `foreword` command and its subcommands."""

from __future__ import annotations

import typer

from foreword.cli.bench import bench
from foreword.cli.calibrate import calibrate
from foreword.cli.conform import conform
from foreword.cli.explain import explain
from foreword.cli.models import models
from foreword.cli.run import run
from foreword.cli.simulate import simulate

app = typer.Typer(
    name="foreword",
    help="What comes before the forward pass of an LLM, and a small engine around it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(run)
app.command()(explain)
app.command()(simulate)
app.command()(calibrate)
app.command()(conform)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")
