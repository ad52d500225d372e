"""`foreword replay`: the steps of a trace on a backend, or its outputs on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from foreword import LLM
from foreword.cli.conform import checked_backend
from foreword.cli.options import SETTINGS, ModelOptions, check_used, engine_options, grouped
from foreword.cli.terminal import note
from foreword.engine.options import LLMOptions
from foreword.insight.outputs import compare, loras_of, measure, recorded, recorded_outputs
from foreword.insight.steps import replay_steps
from foreword.trace.reader import Trace

ENGINE = engine_options(without=("seed",), defaults={"model": ""})


@grouped(engine=ENGINE)
def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace (docs/conformance.md).")],
    backend: Annotated[
        str, typer.Option(help="Without a model: auto, loops, numpy, native or device, which prepares each step.")
    ] = "auto",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE[,NAME=VALUE]",
            help="Compare with the model under other options of the executor, such as executor=numpy or "
            "weight_format=fp32, in place of the recorded log-probabilities.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of two log-probabilities that counts as equal.")
    ] = 0.05,
    *,
    engine: ModelOptions,
) -> None:
    """Replay a trace: every tensor of every step on a backend, or with --model its outputs.

    With a model the recorded tokens are taken, and their log-probabilities compared. Exit status 1 if something
    differs.
    """
    if not engine.model:
        check_used(context, [*(ENGINE.options.keys() - {"model"}), "against", "tolerance"], "without --model")
        steps = replay_steps(file, backend=checked_backend(backend))
        print(steps)
        raise typer.Exit(0 if steps.ok else 1)
    check_used(context, ["backend"], "with --model")
    trace = Trace.read(file)
    if trace.damage is not None:
        note(f"{trace.damage}; what comes before it is used")
    found = recorded_outputs(trace)
    outputs = [output for output in found if output.is_text]
    if len(outputs) < len(found):
        left_out = next(output.req_id for output in found if not output.is_text)
        why = "it has images or sounds, which are not in the trace, or bidirectional ranges"
        note(f"request {left_out!r}: {why}; such requests are left out")
    settings: LLMOptions = {**engine.settings, "loras": loras_of(outputs, engine.settings.get("loras") or {})}
    with LLM(engine.model, **settings) as llm:
        got = measure(llm, outputs)
    expected = recorded(outputs)
    if against is not None:
        others: LLMOptions = {**settings, **other_options(against)}
        with LLM(engine.model, **others) as llm:
            expected = measure(llm, outputs)
    report = compare(outputs, expected, got, tolerance)
    print(f"{file}: {report}")
    raise typer.Exit(0 if report.ok else 1)


def other_options(text: str) -> LLMOptions:
    """Return the options of "name=value,name=value". BadParameter for an unknown name."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in SETTINGS:
            raise typer.BadParameter(f"{part!r:.80}: give NAME=VALUE of an option.", param_hint="--against")
        found[name] = SETTINGS[name].read(value)
    return cast(LLMOptions, found)
