"""Measure the cost of an executor's steps, and fit the cost model for `foreword simulate` to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.batch import InputBuffers, KVGroup, prepare_inputs, step_needs
from foreword.bench.shapes import Shape
from foreword.errors import ConfigError
from foreword.executors import Executor
from foreword.sampling import Processors
from foreword.simulation import CostModel


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Median seconds of a step of this shape: prepared, run and sampled."""

    shape: Shape
    seconds: float


def shapes(
    *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, max_context_tokens: int
) -> list[Shape]:
    """Return decode steps and prompt chunks of many sizes within these limits."""
    lengths = [n for n in (0, 64, 256, 1024, 4096) if n < max_model_len]
    reqs = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= max_num_seqs]
    chunks = [n for n in (16, 64, 256, 512, 1024) if n <= max_num_batched_tokens]
    wanted = [Shape(n, 1, length) for n in reqs for length in lengths]
    wanted += [Shape(1, chunk, length) for chunk in chunks for length in lengths]
    return [
        shape
        for shape in wanted
        if shape.length < max_model_len
        and shape.num_tokens <= max_num_batched_tokens
        and shape.num_context_tokens <= max_context_tokens
    ]


def measure(
    executor: Executor,
    wanted: Iterable[Shape],
    *,
    vocab_size: int,
    max_model_len: int,
    kv_groups: Sequence[KVGroup],
    num_blocks: int,
    num_states: int = 0,
    num_runs: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[MeasuredStep]:
    """Measure steps as an engine runs them, one shape after the other. Shapes that do not fit in the pool are left
    out.
    """
    for shape in wanted:
        if not shape.fits(kv_groups, num_blocks, num_states) or shape.length >= max_model_len:
            continue
        states, plan = shape.admit(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            kv_groups=kv_groups,
            first_state=num_blocks if num_states else 1,
        )
        buffers = InputBuffers.for_states(states, shape.num_tokens)
        processors = Processors(states)
        times = []
        for _ in range(1 + num_runs):
            start = clock()
            batch = prepare_inputs(states, plan, buffers, gather_block_tables=executor.reads_gathered_tables)
            executor.launch(batch, processors.step(step_needs(batch))).result()
            times.append(clock() - start)
        yield MeasuredStep(shape, float(np.median(times[1:])))


def fit(steps: Sequence[MeasuredStep]) -> tuple[CostModel, float]:
    """Return the cost model of measured steps, and its mean relative error. Raise ConfigError for fewer steps than
    coefficients.
    """
    if len(steps) < 3:
        raise ConfigError(f"{len(steps)} measured steps: a cost model has 3 coefficients; give the pool more blocks")
    tokens = np.array([s.shape.num_tokens for s in steps])
    context = np.array([s.shape.num_context_tokens for s in steps])
    seconds = np.array([s.seconds for s in steps])
    cost = CostModel.fitted(tokens, context, seconds)
    return cost, cost.error(tokens, context, seconds)
