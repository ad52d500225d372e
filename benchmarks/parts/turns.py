"""Engines that serve the same prompts in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from foreword.batch import SamplingParams
from foreword.bench.serving import Served, serve
from foreword.engine.engine import Engine
from foreword.models.loader import LoadedModel

K = TypeVar("K")


def chat_prompts(model: LoadedModel, messages: Sequence[str]) -> list[list[int]]:
    """Each message as a conversation of the model's chat template."""
    tokenizer = model.tokenizer
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": message}]) for message in messages]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def in_turns(
    engines: Mapping[K, Engine], prompts: Sequence[list[int]], params: SamplingParams, repeats: int
) -> Iterator[tuple[K, Served]]:
    """The prompts on each engine, ``repeats`` times after one time to warm up, which is not yielded.

    AssertionError if an engine's tokens differ from those of the first.
    """
    wanted: list[list[int]] | None = None
    for turn in range(repeats + 1):
        for name, engine in engines.items():
            served = serve(engine, prompts, [params] * len(prompts))
            wanted = wanted or served.tokens
            assert served.tokens == wanted, f"{name} changed the output"
            if turn:
                yield name, served
