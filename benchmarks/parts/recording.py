"""Measure the cost of recording the steps of an engine: nothing recorded, the last steps in memory, every step in a
file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from foreword.batch import KVGroup
from foreword.bench.engine_host import NothingModel
from foreword.bench.serving import greedy
from foreword.engine.build import build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.scheduler import SchedulerConfig
from parts.turns import load_with

PROMPT = 128
BLOCK_SIZE = 16
VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class RecordingResult:
    """Decode steps of ``rows`` requests. model: "nothing" computes nothing. how: what is recorded.

    step_us: the time of a step, the time until the file is written included. cpu_us: the same of the process in all its
    threads, which other processes disturb less. Both are medians over the turns. ratio: the median over the turns of
    step_us over the mean of the two engines that record nothing ("nothing", "again"), in the same turn: how far the
    ratios of these two are from 1 is the noise.
    """

    model: str
    rows: int
    how: str
    step_us: float
    cpu_us: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.model:<10}{self.rows:>5} rows  {self.how:<8}{self.step_us:>11.1f} µs{self.ratio:>9.4f}"
            f"{self.cpu_us:>11.1f} µs"
        )


def run(
    *, model: str = "smollm2", rows: Sequence[int] = (8, 64, 256), turns: int = 15, num_threads: int | None = None
) -> Iterator[RecordingResult]:
    """Let engines that differ in what they record take turns, first around a model that computes nothing, then around
    the given one with 64 rows. Prompts have different lengths, so that some row gets a block in most steps.
    """
    for count in rows:
        yield from _compare("nothing", count, partial(_engine_of_nothing, count), turns, num_steps=40)
    loaded = load_with(model, {} if num_threads is None else {"num_threads": num_threads})
    yield from _compare(model, 64, partial(build_engine, loaded), turns, num_steps=6)


def _compare(
    model: str, rows: int, make: Callable[[EngineConfig], Engine], turns: int, num_steps: int
) -> Iterator[RecordingResult]:
    limit = PROMPT + BLOCK_SIZE + (turns + 1) * num_steps + 8
    base = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=2048),
        max_model_len=limit,
        num_blocks=1 + rows * -(-limit // BLOCK_SIZE),
        prefix_caching=False,
        flight_steps=0,
        speculation=None,
    )
    with TemporaryDirectory() as folder, ExitStack() as after:
        ways = {
            "nothing": base,
            "ring": replace(base, flight_steps=EngineConfig().flight_steps),
            "file": replace(base, record=str(Path(folder) / "steps.jsonl")),
            "again": base,
        }
        engines = {how: make(config) for how, config in ways.items()}
        times: dict[str, list[tuple[float, float]]] = {how: [] for how in ways}
        for engine in engines.values():
            after.callback(engine.close)
            _fill(engine, rows, limit)
        names = list(ways)
        for turn in range(turns):
            first = turn % len(names)
            for how in names[first:] + names[:first]:  # each goes first as often as the others
                engine = engines[how]
                begin, busy = time.perf_counter(), time.process_time()
                for _ in range(num_steps):
                    engine.step()
                if engine.recorder is not None:
                    engine.recorder.close()  # writes what waits, and goes on
                times[how].append((time.perf_counter() - begin, time.process_time() - busy))
    steps = {how: np.array(found) / num_steps for how, found in times.items()}
    unrecorded = (steps["nothing"][:, 0] + steps["again"][:, 0]) / 2
    for how, found in steps.items():
        step, cpu = np.median(found, 0).tolist()
        ratio = float(np.median(found[:, 0] / unrecorded))
        yield RecordingResult(model, rows, how, 1e6 * step, 1e6 * cpu, ratio)


def _engine_of_nothing(rows: int, config: EngineConfig) -> Engine:
    assert config.max_model_len is not None
    assert config.num_blocks is not None
    return Engine(
        NothingModel(rows, VOCAB_SIZE),
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len,
        kv_groups=[KVGroup(block_size=BLOCK_SIZE)],
        num_blocks=config.num_blocks,
        config=config,
    )


def _fill(engine: Engine, rows: int, max_tokens: int) -> None:
    """Compute the prompts of all rows."""
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = rng.integers(1, VOCAB_SIZE, PROMPT + i % BLOCK_SIZE).tolist()
        engine.add_request(f"request-{i}", prompt, greedy(max_tokens))
    while np.count_nonzero(engine.states.live) < rows or engine.states.num_computed_tokens.min() < PROMPT:
        engine.step()
    for _ in range(4):
        engine.step()
