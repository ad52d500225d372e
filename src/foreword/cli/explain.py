"""`foreword explain`: the tables of the first steps of some requests, without a model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from foreword.cli.options import counts, option
from foreword.cli.terminal import print_text, terminal_width
from foreword.insight.page import write_page
from foreword.insight.record import step_as_json
from foreword.insight.toy import toy_steps


def explain(
    prompts: Annotated[str, typer.Option(help="Prompt lengths, one per request, separated by commas.")] = "3,2,8",
    budget: Annotated[int, option("max_num_batched_tokens", "--budget", default=10)] = 10,
    block_size: Annotated[int, option("block_size", default=2)] = 2,
    max_model_len: Annotated[int, option("max_model_len", default=12)] = 12,
    steps: Annotated[int, typer.Option(min=1, max=2**20, help="Number of steps to show.")] = 2,
    token: Annotated[
        int | None, typer.Option(min=0, max=2**20, help="Describe the origin of one token of each step.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the page of `foreword inspect` for these steps, in place of text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tensors as JSON, one step per line.")] = False,
) -> None:
    """Show what a step prepares: which tokens, at which positions, from which rows, into which slots.

    The default is three requests with prompts of 3, 2 and 8 tokens, 10 tokens per step and blocks of 2: the first step
    computes all of two prompts and a chunk of the third, the second mixes two decodes with the rest of the chunk.
    """
    if as_json and token is not None:
        raise typer.BadParameter("cannot be combined with --json; give one of them", param_hint="--token")
    if html is not None and (as_json or token is not None):
        raise typer.BadParameter("cannot be combined with --json or --token; give one of them", param_hint="--html")
    lengths = counts("--prompts", prompts, max_model_len - 1)
    if html is not None:
        with TemporaryDirectory() as folder:
            file = Path(folder, "explain.jsonl")
            for _ in toy_steps(
                lengths, budget=budget, block_size=block_size, max_model_len=max_model_len, steps=steps, record=file
            ):
                pass
            print(f"{html}: {write_page(file, html)}")
        return
    widest = 0
    shown = toy_steps(lengths, budget=budget, block_size=block_size, max_model_len=max_model_len, steps=steps)
    for i, batch in enumerate(shown):
        widest = max(widest, batch.num_tokens)
        if as_json:
            print(step_as_json(batch))
        elif token is None:
            print(("\n" if i else "") + str(batch.explain(width=terminal_width())))
        elif token < batch.num_tokens:
            print_text(f"Step {batch.step}. {batch.explain(token=token)}")
    if token is not None and token >= widest:
        raise typer.BadParameter(f"{token}: the steps have tokens 0 to {widest - 1}", param_hint="--token")
