"""Engines that serve the same prompts in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from foreword.batch import SamplingParams
from foreword.bench.serving import Served, serve
from foreword.engine.build import load
from foreword.engine.engine import Engine
from foreword.engine.model import Model

K = TypeVar("K")


def load_with(model: str, options: Mapping[str, Any] | None) -> Model[Any]:
    """Return the model for the executor and with the executor's options among these."""
    chosen = dict(options or {})
    return load(model, chosen.pop("executor", "auto"), chosen)


def chat_prompts(model: Model[Any], messages: Sequence[str]) -> list[list[int]]:
    """Return each message as a conversation in the model's chat template."""
    tokenizer = model.tokenizer
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": message}]) for message in messages]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def in_turns(
    engines: Mapping[K, Engine], prompts: Sequence[list[int]], params: Sequence[SamplingParams], repeats: int
) -> Iterator[tuple[K, Served]]:
    """The prompts on each engine, ``repeats`` times after one time to warm up, which is not yielded. Each turn begins
    with another engine than the one before.

    Raise AssertionError if an engine's tokens differ from those of another.
    """
    wanted: list[list[int]] | None = None
    for turn in range(repeats + 1):
        names = list(engines)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            served = serve(engines[name], prompts, params)
            wanted = wanted or served.tokens
            assert served.tokens == wanted, f"{name} changed the output"
            if turn:
                yield name, served
