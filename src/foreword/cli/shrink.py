"""`foreword shrink`: the smallest part of a trace that still shows a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.terminal import note
from foreword.errors import ConfigError
from foreword.trace.failing import as_test, failing_of, write_trace
from foreword.trace.project import num_steps, requests_of
from foreword.trace.reader import Trace
from foreword.trace.shrink import Shrinker, evidence
from foreword.trace.tensors import NAMED


def shrink(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace (docs/conformance.md).")],
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="The recorded tensor that differs; default: any.")
    ] = None,
    failing: Annotated[
        str | None,
        typer.Option(
            metavar="TEST",
            help="What shows the fault: a command, with the file's name in place of {} or at its end and exit status 1 "
            "if it fails, or module:name, a function of a trace. Default: a recorded tensor differs.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the small trace is written.")
    ] = None,
    print_test: Annotated[
        bool, typer.Option("--as-test", help="Print a file for pytest, with the small trace in it.")
    ] = False,
) -> None:
    """Shrink a trace to the few requests and steps that still show a fault.

    A part that cannot be replayed is not tried. With --failing the trace has decisions alone.
    """
    if out is None and not print_test:
        raise typer.BadParameter("give it, or --as-test: else the small trace is nowhere.", param_hint="--out")
    if tensor is not None and failing is not None:
        raise typer.BadParameter("--failing has a test of its own; leave it out.", param_hint="--tensor")
    if tensor is not None and tensor != "req_ids" and tensor not in NAMED:
        raise ConfigError(f"--tensor {tensor!r:.80}: no tensor of a trace; docs/conformance.md has their names")
    trace = Trace.read(file)
    if trace.damage is not None:
        note(f"{trace.damage}; what comes before it is used")
    shrinker = Shrinker(evidence(tensor) if failing is None else failing_of(failing))
    small = shrinker.shrink(trace, tensor=tensor, keep_tensors=failing is None)
    if out is not None:
        write_trace(out, small)
    note(
        f"{len(trace.events)} events → {len(small.events)}: {len(requests_of(small.events))} requests, "
        f"{num_steps(small.events)} steps, in {shrinker.num_tries} tries"
    )
    if print_test:
        print(as_test(small, failing), end="")
