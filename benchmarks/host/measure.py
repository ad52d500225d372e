"""Time contenders that take turns on the same steps; their tensors must agree."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.bench.traffic import Step
from host.contenders import Contender, Tensors

WARM_UP = 25


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians in µs. prepare: state changes and the tensors of a step; commit: recording its samples."""

    workload: str
    engine: str
    prepare_us: float
    commit_us: float


def measure(
    workload: str,
    steps: Sequence[Step],
    make_output: Callable[[int], Any],
    contenders: Sequence[Contender],
    *,
    turn: int,
    nice: int | None = None,
) -> list[Cost]:
    """Run ``turn`` steps of each contender, then the next ``turn`` steps; the first contender rotates.

    With turn = 1 all contenders get the same output object of a step; otherwise each gets its own, made just before
    the timed call. nice: priority of the process meanwhile. The first WARM_UP steps (at least one turn) are not
    counted. Raise AssertionError if tensors that two contenders both have differ in the last step of a turn.
    """
    times: dict[str, tuple[list[int], list[int]]] = {c.name: ([], []) for c in contenders}
    gc.collect()
    gc.freeze()
    gc.disable()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if nice is not None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    try:
        for first in range(0, len(steps), turn):
            shift = first // turn % len(contenders)
            shared = make_output(first) if turn == 1 else None
            agreed: tuple[str, Tensors] | None = None
            for c in [*contenders[shift:], *contenders[:shift]]:
                prepare, commit = times[c.name]
                for t in range(first, min(first + turn, len(steps))):
                    c.take(steps[t], make_output(t) if shared is None else shared)
                    _timed(c.prepare, prepare)
                    if t == min(first + turn, len(steps)) - 1:
                        agreed = _compare(agreed, c, f"{workload}, step {t}")
                    c.ready()
                    _timed(c.commit, commit)
    finally:
        if nice is not None:
            os.setpriority(os.PRIO_PROCESS, 0, before)
        gc.enable()
        gc.unfreeze()
    skip = max(WARM_UP, turn)
    return [Cost(workload, name, _median_us(p[skip:]), _median_us(m[skip:])) for name, (p, m) in times.items()]


def _timed(call: Callable[[], object], into: list[int]) -> None:
    start = time.perf_counter_ns()
    call()
    into.append(time.perf_counter_ns() - start)


def _compare(agreed: tuple[str, Tensors] | None, contender: Contender, where: str) -> tuple[str, Tensors]:
    ours = contender.tensors()
    if agreed is None:
        return contender.name, {name: tensor.copy() for name, tensor in ours.items()}
    other, theirs = agreed
    for name in ours.keys() & theirs.keys():
        if not np.array_equal(ours[name], theirs[name]):
            raise AssertionError(f"{where}: {contender.name} and {other} differ in {name}")
    return agreed


def _median_us(nanoseconds: list[int]) -> float:
    return float(np.median(nanoseconds)) / 1e3
