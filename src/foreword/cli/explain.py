"""`foreword explain`: the tables of a few steps, no model needed."""

from __future__ import annotations

from typing import Annotated

import typer

from foreword.errors import ConfigError
from foreword.insight.toy import toy_steps


def explain(
    prompts: Annotated[str, typer.Option(help="Prompt lengths, one a request.")] = "3,2,8",
    budget: Annotated[int, typer.Option(help="Tokens of a step at most.")] = 10,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 2,
    max_model_len: Annotated[int, typer.Option(help="Tokens of a request at most.")] = 12,
    steps: Annotated[int, typer.Option(help="Steps to show.")] = 2,
    token: Annotated[int | None, typer.Option(help="Tell in a sentence where this token comes from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tensors as JSON, one step a line.")] = False,
) -> None:
    """Show what a step prepares: which tokens, at which positions, from which rows, into which slots.

    The default is three requests with prompts of 3, 2 and 8 tokens, 10 tokens a step and blocks of 2: the first step
    computes all of two prompts and a chunk of the third, the second mixes two decodes with the rest of the chunk.
    """
    from foreword.insight.steps import step_as_json

    try:
        lengths = [int(part) for part in prompts.split(",")]
    except ValueError:
        raise ConfigError(f"--prompts {prompts!r}: give lengths separated by commas, such as 3,2,8") from None
    shown = toy_steps(lengths, budget=budget, block_size=block_size, max_model_len=max_model_len, steps=steps)
    for i, (batch, states) in enumerate(shown):
        if as_json:
            print(step_as_json(batch, states))
        elif token is not None:
            if token < batch.num_tokens:
                print(f"Step {batch.step}. {batch.explain(token=token)}")
        else:
            print(("\n" if i else "") + str(batch.explain()))
