"""Time between two runs of the model in the asynchronous and the synchronous loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch
from foreword.bench.serving import Served, greedy
from foreword.engine.build import build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.executors import HostExecutor
from foreword.scheduler import SchedulerConfig
from parts.prompts import PROMPTS
from parts.turns import chat_prompts, in_turns, load_with


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """Medians over the steps that only decode or verify, and over repeats.

    step_ms: from the start of one run of the model to the next. gap_us: from the end of one run to the start of the
    next, sampling included. tok_s: output tokens per second, prompts included. ratio: tok_s over that of the
    synchronous loop in the same turn.
    """

    at_once: int
    speculation: bool
    async_scheduling: bool
    step_ms: float
    gap_us: float
    tok_s: float
    ratio: float


class Watched(HostExecutor):
    """An executor that records when it computes."""

    def __init__(self, executor: HostExecutor) -> None:
        super().__init__(executor.sampler)
        self.executor, self.capabilities = executor, executor.capabilities
        self.reads_gathered_tables = executor.reads_gathered_tables
        self.runs: list[tuple[float, float, bool]] = []  # begin, end, whether it computed a part of a prompt

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        begin = time.perf_counter()
        prefills = bool(batch.is_prefilling.any())  # counted as part of the run, not of the gap
        logits = self.executor.compute(batch, logits_indices)
        self.runs.append((begin, time.perf_counter(), prefills))
        return logits

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        self.executor.copy_blocks(sources, destinations)


@dataclass(slots=True)
class _Runs:
    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tok_s: list[float] = field(default_factory=list)

    def add(self, served: Served, watched: list[tuple[float, float, bool]]) -> None:
        mine = (run for run in watched if run[0] >= served.begin)
        for (begin, end, before), (after, _, prefills) in pairwise(mine):
            if not before and not prefills:
                self.steps.append(after - begin)
                self.gaps.append(after - end)
        self.tok_s.append(served.num_tokens / (served.end - served.begin))


def run(
    model: str,
    *,
    at_once: Sequence[int] = (1, 8, 32),
    max_tokens: int = 64,
    repeats: int = 3,
    options: dict[str, Any] | None = None,
) -> Iterator[OverlapResult]:
    """Run both loops in turns on one executor, with and without prompt-lookup speculation.

    Raise AssertionError if their tokens differ.
    """
    loaded = load_with(model, options)
    base = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=max(at_once)), max_model_len=1024, prefix_caching=False)
    executor = build_engine(loaded, base).executor
    assert isinstance(executor, HostExecutor)
    watched = Watched(executor)
    engines = {
        (speculation is not None, ahead): build_engine(
            loaded, replace(base, async_scheduling=ahead, speculation=speculation), executor=watched
        )
        for speculation in (None, SpeculationConfig())
        for ahead in (False, True)
    }
    prompts = chat_prompts(loaded, [message for messages in PROMPTS.values() for message in messages])
    for count in at_once:
        runs = {mode: _Runs() for mode in engines}
        for mode, served in in_turns(
            engines, list(islice(cycle(prompts), count)), [greedy(max_tokens)] * count, repeats
        ):
            runs[mode].add(served, watched.runs)
        for (speculation, ahead), r in runs.items():
            yield OverlapResult(
                at_once=count,
                speculation=speculation,
                async_scheduling=ahead,
                step_ms=1e3 * float(np.median(r.steps)),
                gap_us=1e6 * float(np.median(r.gaps)),
                tok_s=float(np.median(r.tok_s)),
                ratio=float(np.median(np.array(r.tok_s) / np.array(runs[speculation, False].tok_s))),
            )
    for engine in engines.values():
        engine.close()
