"""Prompts served to their end, and engines that serve the same prompts in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from foreword.arrays import I64
from foreword.batch import SamplingParams
from foreword.engine.engine import Engine
from foreword.engine.outputs import RequestOutput
from foreword.models.loader import LoadedModel

K = TypeVar("K")


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The outputs in the order of the prompts, and when the run began and ended, in seconds of `time.perf_counter`.

    drafts: int64 [3], the run's drafts, its accepted drafts, and its verifications of a request's drafts.
    """

    outputs: list[RequestOutput]
    begin: float
    end: float
    drafts: I64

    @property
    def tokens(self) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self.outputs]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def decode_tok_s(self) -> float:
        """Tokens except the first of each request, over the time from the last first token to the end."""
        count = self.num_tokens - len(self.outputs)
        begin = max(o.metrics.first_token_time or self.end for o in self.outputs)
        return count / (self.end - begin) if count else 0.0


def greedy(max_tokens: int) -> SamplingParams:
    """Parameters that generate ``max_tokens`` token ids, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def chat_prompts(model: LoadedModel, messages: Sequence[str]) -> list[list[int]]:
    """Each message as a conversation of the model's chat template."""
    tokenizer = model.tokenizer
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": message}]) for message in messages]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def serve(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Served:
    """Add all requests, then step until none is left."""
    before = _drafts(engine)
    begin = time.perf_counter()
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, p)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step()}
    end = time.perf_counter()
    return Served([outputs[str(i)] for i in range(len(prompts))], begin, end, _drafts(engine) - before)


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


def _drafts(engine: Engine) -> I64:
    if engine.speculation is None:
        return np.zeros(3, np.int64)
    stats = engine.speculation.stats
    return np.array([stats.num_drafted, stats.num_accepted, stats.num_steps])
