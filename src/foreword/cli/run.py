"""`foreword run`: answer a prompt, and show the steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from foreword import LLM, SamplingParams
from foreword.cli.options import Model
from foreword.executors.native import NativeExecutor
from foreword.insight.steps import StepInspector


def run(
    prompt: Annotated[str, typer.Argument(help="The prompt, or with --raw the text to continue.")],
    model: Model = "smollm2",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=2**24, help="Maximum number of tokens. The default of the Python API is 16.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy. The default of the Python API is 1.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler: equal seeds give equal answers.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A JSON schema that the answer follows.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without a chat template.")] = False,
    show_steps: Annotated[
        bool, typer.Option("--explain", help="Show the tables of the first steps, and the memory in use.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=2**20, help="Number of steps that --explain shows.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Generate an answer with a real model on this machine's CPU."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        structured_outputs=None if json_schema is None else {"json": json_schema.read_text(errors="replace")},
    )
    params.check()  # before the model is loaded
    llm = LLM(model)
    inspector = StepInspector(steps)
    if show_steps:
        if isinstance(llm.engine.executor, NativeExecutor):
            print(llm.engine.executor.memory_report(), file=sys.stderr)
        llm.engine.observers.add(inspector)
    if raw or not llm.tokenizer.has_chat_template:
        output = llm.generate(prompt, params, progress=False)[0]
    else:
        output = llm.chat([{"role": "user", "content": prompt}], params, progress=False)[0]
    answer = output.outputs[0]
    if as_json:
        result = {
            "prompt": prompt,
            "prompt_token_ids": list(output.prompt_token_ids),
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "finish_reason": str(answer.finish_reason),
            "steps": inspector.shown,
        }
        print(json.dumps(result))
        return
    print(answer.text.strip())
    for text in inspector.shown:
        print("\n" + text)
