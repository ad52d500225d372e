"""Mixed traffic for minutes or millions of steps: every output is checked, and nothing may be lost, left or grow.

    PYTHONPATH=src python tests/storms/soak.py --minutes 10
    PYTHONPATH=src python tests/storms/soak.py --steps 1000000 --seed 3
    PYTHONPATH=src python tests/storms/soak.py --lane "light async" --steps 40000 --seed 3     # repeats one lane alone

Several engines ("lanes") run in turns: requests arrive in waves, with shared prefixes, priorities and random
parameters; some are aborted; the executor fails at random; pools are too small for the load, so requests are preempted;
prefix caches are reset. From time to time a lane is drained, and then every block and row must be free. Each lane
depends on the seed alone. A violation prints the seed, the lane and its step, and the program ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from random import Random
from typing import Any

import numpy as np
from hash_model import HashExecutor, logits_table
from interrupts import end_process, watchdog
from scenes import GROUPS, Catalogue, Entry, Scene, V, Violation, check_idle, check_outcome, check_pool, some_params

from foreword.batch import InputBatch, SamplingParams
from foreword.engine import RequestOutput
from foreword.sampling import Sampled
from foreword.sampling.verification import accepted_tokens

TURN = 500  # most steps of a lane before the next one runs; LIGHT times as many of a light one
LIGHT = 10
DRAIN = 2000  # steps of a lane between two drains
WARM_UP = 0.25  # the part of the run before memory is compared
MOST_GROWTH = 16 << 20  # bytes, after the warm-up
PATIENCE = 120.0  # seconds for one turn


class Failing(HashExecutor):
    """Fails once where ``fails`` says."""

    fails: str | None = None

    def _fail(self, where: str) -> None:
        if self.fails == where:
            self.fails = None
            raise MemoryError(f"soak: {where}")

    def launch(self, batch: InputBatch, sampling: Any) -> Any:
        self._fail("launch")
        return super().launch(batch, sampling)

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        self._fail("copies")
        super().copy_blocks(sources, destinations)

    def compute(self, batch: InputBatch, logits_indices: np.ndarray) -> np.ndarray:
        logits = super().compute(batch, logits_indices)
        self._fail("result")
        return logits


class Light(Failing):
    """An executor for greedy requests, which looks up the most likely token instead of sampling it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.table = logits_table(V).argmax(1).astype(np.int32)

    def launch(self, batch: InputBatch, sampling: Any) -> LightStep:
        self._fail("launch")
        self.apply_block_ops(batch.block_ops)
        return LightStep(self, batch)


@dataclass(frozen=True, slots=True)
class LightStep:
    executor: Light
    batch: InputBatch

    def result(self) -> Sampled:
        batch = self.batch
        drawn = self.executor.compute(batch, batch.logits_indices)
        if len(drawn) > batch.num_reqs:
            width = int(np.diff(batch.cu_num_logits).max())
            drawn = accepted_tokens(drawn, batch.draft_token_ids, batch.cu_num_logits, width)
        return Sampled(drawn, {})


def light_params(random: Random) -> SamplingParams:
    """Greedy, and as a rule long."""
    stop = random.sample(range(V), 1) if random.random() < 0.2 else []
    return SamplingParams(
        temperature=0.0,
        max_tokens=random.choice([random.randint(1, 8), 80]),
        n=random.choice([1] * 15 + [3]),
        stop_token_ids=stop,
        detokenize=random.random() < 0.1,
    )


@dataclass
class Lane:
    """An engine of the soak test, with its traffic."""

    name: str
    scene: Scene
    executor: type[Failing]
    catalogue: Catalogue
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    live: dict[str, Entry] = field(default_factory=dict)
    load: int = 0

    def __post_init__(self) -> None:
        scene = self.scene
        self.runs_on = self.executor(V, GROUPS[scene.kind], scene.num_blocks, scene.num_states)
        self.engine = scene.engine(executor=self.runs_on)
        self.names = map(str, count())

    def turn(self, num_steps: int) -> None:
        random, counts = self.random.random, self.counts
        for _ in range(num_steps):
            if random() < 0.01 or not self.engine.has_work:
                self.load = self.random.choice([1, 4, 8, 16, 30])
            while self.engine.num_unfinished < self.load and (random() < 0.7 or not self.engine.has_work):
                self.arrive()
            if random() < 0.01 and self.live:
                self.abort(self.random.choice(list(self.live)))
            if random() < 0.002:
                self.runs_on.fails = self.random.choice(["launch", "copies", "result"])
            self.step()
            if counts["steps"] % DRAIN == 0:
                self.drain()

    def arrive(self) -> None:
        name, entry = next(self.names), self.random.choice(self.catalogue.entries)
        stream, priority = self.random.random() < 0.05, self.random.randrange(3)
        self.engine.add_request(name, entry.prompt, entry.params, stream=stream, priority=priority)
        self.live[name] = entry
        self.counts["requests"] += 1

    def abort(self, name: str) -> None:
        output, entry = self.engine.abort(name), self.live.pop(name)
        if output is None:
            raise Violation("lost request", f"{name} cannot be aborted")
        self.counts["aborts"] += 1
        self.count(output)
        if entry.params.best_of is None:
            for got, whole in zip(output.outputs, entry.wanted, strict=False):
                if got.token_ids != whole[0][: len(got.token_ids)]:
                    raise Violation("wrong output", f"aborted request {name}: {got}, alone {whole}")

    def step(self) -> None:
        self.counts["steps"] += 1
        self.counts["checked steps"] += self.engine.config.check == "full"
        try:
            outputs = self.engine.step()
        except MemoryError as error:
            if not str(error).startswith("soak"):
                raise
            self.counts["failures"] += 1
            return
        for output in outputs:
            if output.finished:
                if output.request_id not in self.live:
                    raise Violation("ended twice", output.request_id)
                entry = self.live.pop(output.request_id)
                self.count(output)
                check_outcome(output, entry, output.request_id)

    def count(self, output: RequestOutput) -> None:
        self.counts["tokens"] += sum(len(c.token_ids) for c in output.outputs)
        self.counts["preemptions"] += output.metrics.num_preemptions
        self.counts["cached prompt tokens"] += output.metrics.num_cached_tokens

    def drain(self) -> None:
        self.runs_on.fails = None
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
        if self.live:
            raise Violation("lost output", f"of {len(self.live)} requests, such as {next(iter(self.live))}")
        check_idle(self.engine)
        if self.random.random() < 0.5:
            check_pool(self.engine)
            self.counts["resets"] += 1


def lanes_of(seed: int) -> list[Lane]:
    light, rich = Catalogue(seed, 150, light_params), Catalogue(seed, 150, some_params)
    long, few = {"max_num_seqs": 8, "max_num_batched_tokens": 64}, {"max_num_seqs": 4, "max_num_batched_tokens": 17}
    tight = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "reserve_full_prompt": False}
    asynchronous, priority = {"async_scheduling": True}, {"policy": "priority"}
    kinds: list[tuple[str, type[Failing], Catalogue, Scene]] = [
        ("rich", Failing, rich, Scene("full", "drafter", 30, tight | priority)),
        ("rich async", Failing, rich, Scene("hybrid", "ngram", 50, tight | asynchronous)),
        ("window", Failing, rich, Scene("window", "no drafts", 24, few)),
        ("states", Failing, rich, Scene("states", "no drafts", 12, few | asynchronous)),
        ("hybrid states", Failing, rich, Scene("hybrid states", "no drafts", 60, tight | asynchronous)),
        ("checked", Failing, rich, Scene("full", "drafter", 30, tight | {"check": "full"})),
        (
            "checked async",
            Failing,
            rich,
            Scene("hybrid states", "no drafts", 60, tight | asynchronous | {"check": "full"}),
        ),
        ("light", Light, light, Scene("full", "no drafts", 120, long, 128)),
        ("light async", Light, light, Scene("full", "no drafts", 120, long | asynchronous, 128)),
        ("light tight", Light, light, Scene("full", "no drafts", 50, tight | priority, 128)),
        ("light drafts", Light, light, Scene("full", "ngram", 120, long | asynchronous, 128)),
    ]
    for catalogue in (light, rich):
        for entry in catalogue.entries:
            entry.wanted  # noqa: B018, computed before the memory is measured
    return [Lane(name, s, e, c, Random(f"{seed} {name}")) for name, e, c, s in kinds]


def turns(lanes: list[Lane], turn: int) -> Iterator[tuple[Lane, int]]:
    """Lanes and their numbers of steps, in turns: long ones of the light lanes, short ones of those with a check."""
    for lane in cycle(lanes):
        if lane.executor is Light:
            yield lane, turn * LIGHT
        else:
            yield lane, turn if lane.scene.options.get("check") != "full" else max(turn // 10, 1)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Memory:
    """Bytes in memory over the run: progress (0 … 1) and bytes at the end of each turn. most_growth: in bytes."""

    most_growth: int
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self, progress: float) -> None:
        gc.collect()
        self.samples.append((progress, resident()))

    def check(self) -> str:
        """The growth between the first half after the warm-up and the second. Violation if it is too much."""
        middle = (1 + WARM_UP) / 2
        before = [size for progress, size in self.samples if WARM_UP <= progress < middle]
        after = [size for progress, size in self.samples if progress >= middle]
        if not before or not after:
            return "not compared"
        growth = max(after) - max(before)
        if growth > self.most_growth:
            raise Violation("memory grows", f"by {growth >> 20} MiB, from {max(before) >> 20} MiB")
        return f"{growth / 2**20:+.1f} MiB after the warm-up"


def soak(
    lanes: list[Lane], turn: int, most_growth: int, progress: Callable[[], float], report: Callable[[], None]
) -> str:
    """Run until the progress is 1. Returns how memory grew; Violation, with lane and step, at the first damage."""
    memory, lane, next_report = Memory(most_growth), lanes[0], time.perf_counter() + 30
    try:
        for lane, num_steps in turns(lanes, turn):
            with watchdog(PATIENCE):
                lane.turn(num_steps)
            memory.sample(progress())
            if time.perf_counter() > next_report:
                report()
                next_report += 30
            if progress() >= 1:
                break
        for lane in lanes:
            with watchdog(PATIENCE):
                lane.drain()
            lane.engine.close()
    except Exception as error:
        kind = error.kind if isinstance(error, Violation) else type(error).__name__
        raise Violation(kind, f"lane {lane.name!r}, step {lane.counts['steps']}: {error}") from error
    return memory.check()


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic for minutes or millions of steps.")
    parser.add_argument("--minutes", type=float, help="run so long")
    parser.add_argument("--steps", type=int, help="run so many steps, of all lanes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lane", help="this lane alone")
    parser.add_argument("--most-growth", type=int, default=MOST_GROWTH >> 20, metavar="MIB", help="of memory")
    options = parser.parse_args()
    if options.minutes is None and options.steps is None:
        options.minutes = 10.0
    lanes = [lane for lane in lanes_of(options.seed) if options.lane in (None, lane.name)]
    start = time.perf_counter()

    def total() -> Counter[str]:
        return sum((lane.counts for lane in lanes), Counter())

    def progress() -> float:
        spent = (time.perf_counter() - start) / (60 * options.minutes) if options.minutes else 0.0
        return max(spent, total()["steps"] / options.steps if options.steps else 0.0)

    def report() -> None:
        seconds, counts = time.perf_counter() - start, total()
        shown = ", ".join(f"{counts[name]:,} {name}" for name in sorted(counts))
        print(f"{seconds:.0f} s: {counts['steps'] / seconds:,.0f} steps/s; {shown}", flush=True)

    try:
        turn = min(TURN, max(options.steps // 50, 10)) if options.steps else TURN
        growth = soak(lanes, turn, options.most_growth << 20, progress, report)
    except Violation as error:
        report()
        print(f"VIOLATION with --seed {options.seed}: {error}")
        raise error.__cause__ or error from None
    report()
    for lane in lanes:
        print(f"  {lane.name:14} " + ", ".join(f"{n:,} {name}" for name, n in sorted(lane.counts.items())))
    print(f"no violation; memory {resident() / 2**20:.0f} MiB at the end, {growth}")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:
        traceback.print_exception(error)
        code = 1
    end_process(code)
