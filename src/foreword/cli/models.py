"""`foreword models`: the models the project knows, and getting them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

models = typer.Typer(help="List the models the project knows, or get one.", no_args_is_help=True)


@models.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one model a line.")] = False,
) -> None:
    """The models known by name, with size, licence and whether they are here."""
    from foreword.models.registry import KNOWN, cached_path

    if as_json:
        for model in KNOWN.values():
            path = cached_path(model.name)
            print(json.dumps({
                "name": model.name,
                "description": model.description,
                "bytes": model.size,
                "license": model.license,
                "path": str(path) if path else None,
            }))  # fmt: skip
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "licence", "here", "what it is"):
        table.add_column(column)
    for model in KNOWN.values():
        here = "yes" if cached_path(model.name) else "no"
        table.add_row(model.name, f"{model.size / 1e6:.0f} MB", model.license, here, model.description)
    Console().print(table)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from `foreword models list`.")],
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="You accept the terms of a model that asks for it.")
    ] = False,
) -> None:
    """Get a model, check its hash, and keep it. Does nothing if it is here; goes on where it stopped."""
    from foreword.models.registry import pull as get

    print(get(name, accept_license=accept_license))
