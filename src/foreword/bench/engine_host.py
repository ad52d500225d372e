"""The engine's own cost per step: schedule, prepare, sample, commit, with a model that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch, KVGroup
from foreword.bench.serving import greedy
from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.executors import HostExecutor
from foreword.scheduler import SchedulerConfig


class NothingModel(HostExecutor):
    """A model that always returns the same logits, [L, V] with a small vocabulary."""

    reads_gathered_tables = False

    def __init__(self, max_num_logits: int, vocab_size: int) -> None:
        super().__init__()
        self.logits = np.zeros((max_num_logits, vocab_size), np.float32)
        self.logits[:, 7] = 1.0

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        return self.logits[: len(logits_indices)]

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EngineHostResult:
    """Median of a decode step of ``num_reqs`` requests, µs."""

    num_reqs: int
    step_us: float


def run(*, num_steps: int = 300, sizes: tuple[int, ...] = (1, 8, 64, 256)) -> Iterator[EngineHostResult]:
    """Measure decode steps of each size with 128 tokens of context, without arrivals and departures."""
    for size in sizes:
        engine = Engine(
            NothingModel(size, 64),
            vocab_size=64,
            max_model_len=1024,
            kv_groups=[KVGroup(block_size=16)],
            num_blocks=1 + size * 64,
            config=EngineConfig(
                scheduler=SchedulerConfig(max_num_seqs=size, max_num_batched_tokens=max(2048, 128 * size))
            ),
        )
        rng = np.random.default_rng(0)
        for i in range(size):
            engine.add_request(str(i), rng.integers(0, 64, 128).tolist(), greedy(num_steps + 50))
        times: list[int] = []
        while engine.has_work:
            start = time.perf_counter_ns()
            engine.step()
            times.append(time.perf_counter_ns() - start)
        yield EngineHostResult(size, float(np.median(times[20 : num_steps + 20])) / 1e3)
