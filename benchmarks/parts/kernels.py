"""Roofline of this machine, and the fraction of it that steps of the native executor reach."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from foreword.batch import InputBatch, InputBuffers, prepare_inputs
from foreword.bench.shapes import Shape
from foreword.executors.native import NativeExecutor
from foreword.executors.pool import batch_groups
from foreword.machine import default_threads
from foreword.models.loader import load_model
from foreword.native import native

BLOCK_SIZE = 16
SHAPES = (*(Shape(n, 1, 256) for n in (1, 8, 32, 64)), Shape(1, 512, 0))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured limits of the machine: memory bandwidth and arithmetic throughput."""

    kind: str = field(default="roofline", init=False)
    isa: str
    memory_gb_s: float
    f32_gflop_s: float
    bf16_gflop_s: float
    int8_gop_s: float

    def arithmetic(self, number_format: str) -> float:
        """Return the operations per ns on numbers of weights or of the cache."""
        return {"fp32": self.f32_gflop_s, "bf16": self.bf16_gflop_s}.get(number_format, self.int8_gop_s)

    def __str__(self) -> str:
        return (
            f"{self.isa}: memory {self.memory_gb_s:.1f} GB/s; fp32 {self.f32_gflop_s:.0f}, "
            f"bf16 {self.bf16_gflop_s:.0f} GFLOP/s; int8 {self.int8_gop_s:.0f} GOP/s"
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of the executor: its time, the lower bound from the roofline, and the time per stage.

    limit_ms = max(bytes / memory, operations / arithmetic); fraction = limit_ms / step_ms. The arithmetic is that of
    the weights' format, and for attention that of the cache's.
    """

    kind: str = field(default="step", init=False)
    weight_format: str
    num_reqs: int
    query_len: int
    context: int
    step_ms: float
    memory_ms: float
    arithmetic_ms: float
    fraction: float
    stages_ms: dict[str, float]

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in self.stages_ms.items() if ms >= 0.005)
        return (
            f"{self.weight_format:<6}{self.num_reqs:>4} x {self.query_len:<4}over {self.context:<5}"
            f"{self.step_ms:>9.2f} ms, limit {max(self.memory_ms, self.arithmetic_ms):>8.2f}: "
            f"{100 * self.fraction:>4.0f} %   ({stages})"
        )


def measure_roofline(num_threads: int | None = None) -> Roofline:
    isa, measured = native.roofline(num_threads or default_threads())
    return Roofline(
        isa,
        measured["memory_bytes"] / 1e9,
        measured["f32_flops"] / 1e9,
        measured["bf16_flops"] / 1e9,
        measured["i8_ops"] / 1e9,
    )


def run(
    *,
    model: str = "smollm2",
    num_threads: int | None = None,
    weight_formats: tuple[str, ...] = ("fp32", "bf16", "int8", "q4"),
    repeats: int = 7,
) -> Iterator[Roofline | StepResult]:
    """Print the roofline first, then the median step of each shape and weight format, with a bf16 cache."""
    roof = measure_roofline(num_threads)
    yield roof
    loaded = load_model(model)
    groups = batch_groups(loaded.decoder, BLOCK_SIZE)
    for weight_format in weight_formats:
        executor = NativeExecutor(
            loaded.decoder,
            loaded.weights,
            num_blocks=max(shape.num_blocks(groups) for shape in SHAPES),
            block_size=BLOCK_SIZE,
            weight_format=cast(Any, weight_format),
            num_threads=num_threads,
        )
        executor.zero_blocks(np.arange(executor.num_blocks, dtype=np.int32))  # else all its pages are the zero page
        for shape in SHAPES:
            states, plan = shape.admit(
                vocab_size=loaded.decoder.vocab_size, max_model_len=shape.length, kv_groups=groups
            )
            buffers = InputBuffers.for_states(states, shape.num_tokens)
            batch = prepare_inputs(states, plan, buffers, gather_block_tables=False)
            yield _measure(executor, roof, weight_format, shape, batch, repeats)


def _measure(
    executor: NativeExecutor, roof: Roofline, weight_format: str, shape: Shape, batch: InputBatch, repeats: int
) -> StepResult:
    executor.compute(batch, batch.logits_indices)
    times, stages = [], []
    for _ in range(repeats):
        before = executor.core.stage_seconds()
        start = time.perf_counter()
        executor.compute(batch, batch.logits_indices)
        times.append(time.perf_counter() - start)
        after = executor.core.stage_seconds()
        stages.append({name: 1e3 * (after[name] - before[name]) for name in after})
    spec = executor.spec
    num_reqs, query_len, context = shape.num_reqs, shape.num_new, shape.num_computed
    kv_row = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers
    kv_bytes = 2 * kv_row * shape.num_context_tokens
    body = spec.num_layers * (
        spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
        + 3 * spec.hidden_size * spec.intermediate_size
    )
    linear_ops = 2 * (body * shape.num_tokens + spec.hidden_size * spec.vocab_size * num_reqs)
    attention_ops = 4 * spec.num_layers * spec.num_heads * spec.head_dim * shape.num_tokens * (context + query_len / 2)
    memory_ms = 1e3 * (executor.core.packed_bytes + kv_bytes) / (roof.memory_gb_s * 1e9)
    arithmetic_ms = linear_ops / (roof.arithmetic(weight_format) * 1e6)
    arithmetic_ms += attention_ops / (roof.arithmetic(executor.kv_format) * 1e6)
    step_ms = 1e3 * float(np.median(times))
    return StepResult(
        weight_format=weight_format,
        num_reqs=num_reqs,
        query_len=query_len,
        context=context,
        step_ms=step_ms,
        memory_ms=memory_ms,
        arithmetic_ms=arithmetic_ms,
        fraction=max(memory_ms, arithmetic_ms) / step_ms,
        stages_ms={name: float(np.median([s[name] for s in stages])) for name in stages[0]},
    )
