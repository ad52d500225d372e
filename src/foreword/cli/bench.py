"""`foreword bench`: figures as ratios in one run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

bench = typer.Typer(help="Measure, as ratios in one run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one result a line.")]


@bench.callback()
def _group() -> None:
    """Measure, as ratios in one run."""


@bench.command()
def host(
    steps: Annotated[int, typer.Option(help="Steps of each workload.")] = 300,
    as_json: Json = False,
) -> None:
    """The host's cost of a step: state changes and tensors, and recording the samples."""
    from foreword.bench import host as measure

    if not as_json:
        print(f"{'':24}{'prepare a step, median µs':^42}{'commit, µs':^18}")
        print(f"{'workload':<24}{'native':>9}{'numpy':>9}{'lists':>10}{'lists/native':>14}{'native':>9}{'lists':>9}")
    for results in measure.run(num_steps=steps):
        if as_json:
            for line in measure.as_dicts(results):
                print(json.dumps(line), flush=True)
            continue
        native, numpy, lists = results
        print(
            f"{native.workload:<24}{native.prepare_us:>9.2f}{numpy.prepare_us:>9.1f}{lists.prepare_us:>10.1f}"
            f"{lists.prepare_us / native.prepare_us:>13.0f}x{native.commit_us:>9.2f}{lists.commit_us:>9.1f}",
            flush=True,
        )
