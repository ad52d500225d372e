"""`foreword calibrate`: measure the step cost of a model on this machine, for `foreword simulate --cost`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from foreword.bench.calibrate import fit, measure, shapes
from foreword.cli.options import EXECUTOR, ModelOptions, chosen_model, engine_options, grouped
from foreword.engine.build import load
from foreword.engine.model import DecoderModel
from foreword.engine.options import split_options
from foreword.errors import ConfigError

DEFAULTS: dict[str, int] = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16}


@grouped(engine=engine_options((*EXECUTOR, *DEFAULTS), defaults=DEFAULTS))
def calibrate(
    context: typer.Context,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, in place of --model.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the cost model, as JSON.")] = Path("cost.json"),
    max_context_tokens: Annotated[
        int, typer.Option(min=1, max=2**30, help="Maximum number of context tokens per step.")
    ] = 16384,
    num_runs: Annotated[int, typer.Option(min=1, max=1000, help="Timed runs per shape.")] = 3,
    *,
    engine: ModelOptions,
) -> None:
    """Time real steps of many shapes, fit a linear cost model and save it.

    seconds of a step = step + token · scheduled tokens + context · context tokens
    """
    if not out.parent.is_dir() or out.is_dir():
        raise typer.BadParameter(f"{out}: not a file in an existing folder", param_hint="--out")
    model, options = chosen_model(context, model_argument, engine.model), split_options(engine.settings)
    loaded = load(model, options.executor, options.of_executor)
    if not isinstance(loaded, DecoderModel):
        raise ConfigError(f"{model}: is not a decoder of Foreword's own loader, which alone is calibrated")
    longest = min(options.config.max_model_len or DEFAULTS["max_model_len"], loaded.spec.longest_model_len)
    config = replace(options.config, max_model_len=longest)
    size = loaded.pool(config, loaded.memory(config))
    steps = []
    wanted = shapes(
        max_model_len=size.max_model_len,
        max_num_seqs=options.config.scheduler.max_num_seqs,
        max_num_batched_tokens=options.config.scheduler.max_num_batched_tokens,
        max_context_tokens=max_context_tokens,
    )
    print(f"{'requests':>8}{'new':>7}{'before':>8}{'ms':>10}")
    for step in measure(
        loaded.executor(size),
        wanted,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        kv_groups=size.kv_groups,
        num_blocks=size.num_blocks,
        num_states=size.num_states,
        num_runs=num_runs,
    ):
        shape = step.shape
        print(f"{shape.num_reqs:>8}{shape.num_new:>7}{shape.num_computed:>8}{1e3 * step.seconds:>10.2f}", flush=True)
        steps.append(step)
    cost, error = fit(steps)
    cost.write(out, model=loaded.name, num_steps=len(steps), mean_relative_error=error)
    print(
        f"\n{1e3 * cost.step:.3f} ms per step + {1e6 * cost.token:.3f} us per token + {1e9 * cost.context:.3f} ns per "
        f"context token; mean relative error {100 * error:.0f}%; saved in {out}"
    )
