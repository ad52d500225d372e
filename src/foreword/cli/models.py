"""`foreword models`: the models known by name, and how to download one."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foreword.models import registry

models = typer.Typer(help="List the models known by name, or download one.", no_args_is_help=True, add_completion=False)


@models.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one model per line.")] = False,
) -> None:
    """The models known by name, with size, licence and whether the file is on this machine."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "licence", "here", "what it is"):
        table.add_column(column)
    for model in registry.KNOWN.values():
        path = registry.cached_path(model.name)
        table.add_row(
            model.name, f"{model.size / 1e6:.0f} MB", model.license, "yes" if path else "no", model.description
        )
        if as_json:
            row = {
                "name": model.name,
                "description": model.description,
                "bytes": model.size,
                "license": model.license,
                "path": str(path) if path else None,
            }
            print(json.dumps(row))
    if not as_json:
        Console().print(table)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from `foreword models list`.")],
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the terms of a model that requires it.")
    ] = False,
) -> None:
    """Download a model, verify its sha256 and keep it. A cached model is not fetched again; a download resumes."""
    print(registry.pull(name, accept_license=accept_license))
