"""Time between two tokens of running requests while prompts arrive, by the share of a step that prompts may take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from foreword.batch import InputBatch
from foreword.bench.serving import greedy
from foreword.engine.build import build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.observer import EngineObserver
from foreword.scheduler import SchedulerConfig, StepPlan
from parts.turns import load_with

EVERY = 20  # steps from the arrival of a prompt to the next
CONTEXT = 128  # tokens of the running requests at first


@dataclass(frozen=True, slots=True)
class MixedResult:
    """Each step gives each running request a token: p50_ms and p99_ms are percentiles of the times of steps. ratio: of
    the second to the first. first_token_ms: the median of the prompts that arrived. tok_s: tokens that the
    steps compute per second, of prompts and outputs.
    """

    share: float
    at_once: int
    p50_ms: float
    p99_ms: float
    ratio: float
    first_token_ms: float
    tok_s: float


class _Tokens(EngineObserver):
    """count: the number of tokens of all steps."""

    def __init__(self) -> None:
        self.count = 0

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self.count += plan.num_tokens


def run(
    model: str,
    *,
    shares: Sequence[float],
    at_once: int,
    prompt_tokens: int = 512,
    steps: int = 300,
    options: dict[str, Any] | None = None,
) -> Iterator[MixedResult]:
    """Yield one result per value of prompt_time_share. All requests stream.

    A prompt arrives every `EVERY` steps, however long these take.
    """
    loaded, executor = load_with(model, options), None
    length = CONTEXT + steps + EVERY
    base = EngineConfig(max_model_len=max(length, prompt_tokens + 1), prefix_caching=False, speculation=None)
    for share in shares:
        scheduler = SchedulerConfig(max_num_seqs=at_once + 16, prompt_time_share=share)
        engine = build_engine(loaded, replace(base, scheduler=scheduler), executor=executor)
        executor, rng = engine.executor, Random(0)

        def ids(count: int, rng: Random = rng) -> list[int]:
            return [rng.randrange(loaded.vocab_size) for _ in range(count)]

        for i in range(at_once):
            engine.add_request(str(i), ids(CONTEXT), greedy(length - CONTEXT), stream=True)
        for _ in range(EVERY):
            engine.step()
        engine.observers.add(tokens := _Tokens())
        times, arrived, first = [], {}, []
        for step in range(steps):
            if step % EVERY == 0:
                arrived[f"prompt {step}"] = time.perf_counter()
                engine.add_request(f"prompt {step}", ids(prompt_tokens), greedy(1), stream=True)
            begin = time.perf_counter()
            outputs = engine.step()
            end = time.perf_counter()
            times.append(end - begin)
            first += [end - arrived[output.request_id] for output in outputs if output.request_id in arrived]
        for name in [*map(str, range(at_once)), *arrived]:
            engine.abort(name)
        p50, p99 = np.percentile(times, [50, 99]).tolist()
        yield MixedResult(
            share, at_once, 1e3 * p50, 1e3 * p99, p99 / p50, 1e3 * float(np.median(first)), tokens.count / sum(times)
        )
        engine.close()
