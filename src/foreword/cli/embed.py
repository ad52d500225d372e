"""`foreword embed`: vectors of texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer

from foreword import LLM, PoolingParams
from foreword.cli.options import EngineOptions, engine_options, grouped

AT_ONCE = 1024  # lines of standard input


@grouped(engine=engine_options(defaults={"model": "all-minilm-l6-v2"}))
def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT…", help="Texts; none: each line of standard input is one.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, max=2**20, metavar="N", help="Keep the first N numbers of a vector.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Shorten texts that the model cannot take whole.")
    ] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Print the embedding of each text as JSON, one per line."""
    params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None)
    lines: Iterable[str] = texts or (line for line in map(str.strip, sys.stdin) if line)
    left = iter(lines)
    with LLM(engine.model, **engine.settings) as llm:
        while some := list(islice(left, AT_ONCE)):
            for text, vector in zip(some, llm.embed(some, params, lora=engine.lora), strict=True):
                print(json.dumps({"text": text, "embedding": vector.tolist()}))
