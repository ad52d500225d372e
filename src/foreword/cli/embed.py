"""`foreword embed`: vectors of texts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer

from foreword import LLM, PoolingParams
from foreword.cli.options import ModelOptions, engine_options, grouped
from foreword.errors import RequestError

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
        bool, typer.Option("--truncate", help="Shorten texts that are longer than the model supports.")
    ] = False,
    *,
    engine: ModelOptions,
) -> None:
    """Print the embedding of each text as JSON, one per line."""
    params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None)
    lines: Iterable[str] = texts or (line for line in map(str.strip, sys.stdin) if line)
    left = iter(lines)
    with LLM(engine.model, **engine.settings) as llm:
        done = 0
        while some := list(islice(left, AT_ONCE)):
            try:
                vectors = llm.embed(some, params, lora=engine.lora)
            except RequestError as error:
                raise _of_text(error, done) from None
            for text, vector in zip(some, vectors, strict=True):
                print(json.dumps({"text": text, "embedding": vector.tolist()}))
            done += len(some)


def _of_text(error: RequestError, num_done: int) -> RequestError:
    """Return the error of a request, named by the number of its text, from 1. num_done: texts before those at once."""
    number = re.fullmatch(r"prompts\[(\d+)\]", error.request_id or "")
    name = f"text {num_done + int(number[1]) + 1}" if number else error.request_id
    return RequestError(name, error.field, error.value, error.reason, error.fix)
