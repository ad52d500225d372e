"""Engines that serve the same prompts in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from foreword.batch import SamplingParams
from foreword.bench.serving import Served, drafts_of, serve
from foreword.engine.build import load
from foreword.engine.engine import Engine
from foreword.engine.model import Model
from foreword.engine.outputs import RequestOutput

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


def in_turns_by_step(
    engines: Mapping[K, Engine], prompts: Sequence[list[int]], params: Sequence[SamplingParams], repeats: int
) -> Iterator[tuple[K, Served]]:
    """Measure the engines in turns of one step, so that other programs on the machine slow all engines down alike.

    The time of a run is that of its engine's steps. The engines use different blocks of the executor that they share:
    see `apart`. Raise AssertionError as `in_turns`.
    """
    names = list(engines)
    for turn in range(repeats + 1):
        seconds, before = dict.fromkeys(names, 0.0), {name: drafts_of(engines[name]) for name in names}
        outputs: dict[K, dict[str, RequestOutput]] = {name: {} for name in names}
        for engine in engines.values():
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(str(i), prompt, p)
        while names := [name for name in names[1:] + names[:1] if engines[name].has_work]:
            for name in names:
                begin = time.perf_counter()
                done = engines[name].step()
                seconds[name] += time.perf_counter() - begin
                outputs[name] |= {output.request_id: output for output in done}
        names = list(engines)
        runs = {
            name: Served(
                [outputs[name][str(i)] for i in range(len(prompts))], 0.0, seconds[name],
                drafts_of(engines[name]) - before[name],
            )
            for name in names
        }  # fmt: skip
        assert all(served.tokens == runs[names[0]].tokens for served in runs.values()), "an engine changed the output"
        if turn:
            yield from runs.items()


def apart(engines: Sequence[Engine]) -> None:
    """Take blocks out of the pools of engines that share an executor, so that each uses others."""
    part = engines[0].cache.pool.num_blocks // len(engines)
    for number, engine in enumerate(engines):
        engine.cache.pool.allocate(number * part)
