"""`foreword embed`: vectors of texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer

from foreword import LLM, PoolingParams
from foreword.cli.options import Model, Threads

AT_ONCE = 1024  # lines of standard input


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT…", help="Texts; none: each line of standard input is one.")
    ] = None,
    model: Model = "all-minilm-l6-v2",
    dimensions: Annotated[
        int | None, typer.Option(min=1, max=2**20, metavar="N", help="Keep the first N numbers of a vector.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Shorten texts that the model cannot take whole.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Print the embedding of each text as JSON, one per line."""
    params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None)
    lines: Iterable[str] = texts or (line for line in map(str.strip, sys.stdin) if line)
    left = iter(lines)
    with LLM(model, num_threads=threads) as llm:
        while some := list(islice(left, AT_ONCE)):
            for text, vector in zip(some, llm.embed(some, params), strict=True):
                print(json.dumps({"text": text, "embedding": vector.tolist()}))
