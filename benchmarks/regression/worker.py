"""Measure one checkout of Foreword, one sample at a time: a process that `regress.py` starts with its sources.

Standard input has the name of a figure per line, standard output gets its samples as JSON, in seconds. It uses what
Foreword's own benchmarks use, so that earlier commits have it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median

from foreword import LLM
from foreword.bench import engine_host
from foreword.bench.host import Ours
from foreword.bench.requests import Requests, make
from foreword.bench.serving import greedy, serve
from foreword.bench.traffic import Step, Workload

WORKLOADS = ("W1", "W2", "W3", "W4", "W5", "W6")
STEPS = 40  # steps in a sample of the host
MOST_PROMPT, MOST_OUTPUT, MOST_REQUESTS = 512, 16, 32  # limits of the short workloads

Sample = dict[str, float]
"""Figure → seconds."""


def host(size: int) -> Iterator[Sample]:
    """Prepare and commit decode steps of ``size`` rows, with the native backend."""
    name = f"S1 decode {size}"
    while True:  # each round admits the requests anew
        ours, steps = Ours(Workload(name, size), 8 * STEPS + 1, "native"), Workload(name, size).steps(8 * STEPS + 1)
        _timed(ours, next(steps))
        for _ in range(8):
            times = [_timed(ours, next(steps)) for _ in range(STEPS)]
            yield {f"prepare, {size}": median(t[0] for t in times), f"commit, {size}": median(t[1] for t in times)}


def _timed(ours: Ours, step: Step) -> tuple[float, float]:
    ours.take(step)
    start = time.perf_counter()
    ours.prepare()
    prepared = time.perf_counter()
    ours.ready()
    ready = time.perf_counter()
    ours.commit()
    return prepared - start, time.perf_counter() - ready


def engine(size: int) -> Iterator[Sample]:
    """Measure steps of the engine around a model that computes nothing."""
    while True:
        (result,) = engine_host.run(num_steps=STEPS, sizes=(size,))
        yield {f"engine, {size}": result.step_us / 1e6}


def workload(name: str, llm: LLM) -> Iterator[Sample]:
    """Measure a shortened workload on a model; each repeat has other token ids."""
    for repeat in count():
        requests = short(make(name, repeat, llm.engine.states.vocab_size))
        served = serve(llm.engine, requests.prompts, list(map(greedy, requests.output_lens)))
        yield {name: served.end - served.begin}


def short(requests: Requests) -> Requests:
    prompts = [prompt[:MOST_PROMPT] for prompt in requests.prompts[:MOST_REQUESTS]]
    lens = [min(n, MOST_OUTPUT) for n in requests.output_lens[:MOST_REQUESTS]]
    return Requests(requests.name, prompts, lens, requests.max_num_seqs)


class Samples:
    """Measurements, made when they are first asked for. ``model`` runs the workloads."""

    def __init__(self, model: str, num_threads: int | None = None) -> None:
        self._model, self._num_threads = model, num_threads
        self._llm: LLM | None = None
        self._running: dict[str, Iterator[Sample]] = {}

    def take(self, name: str) -> Sample:
        """Return the next sample of a figure or of two, by its name."""
        if name not in self._running:
            self._running[name] = self._begin(name)
            next(self._running[name])  # which warms up
        return next(self._running[name])

    def _begin(self, name: str) -> Iterator[Sample]:
        if name in WORKLOADS:
            if self._llm is None:
                self._llm = LLM(self._model, max_model_len=1024, num_threads=self._num_threads)
            return workload(name, self._llm)
        kind, _, size = name.partition(" ")
        kinds: dict[str, Callable[[int], Iterator[Sample]]] = {"host": host, "engine": engine}
        return kinds[kind](int(size))


def main() -> None:
    samples = Samples(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(samples.take(line.strip())), flush=True)


if __name__ == "__main__":
    main()
