"""The parts of the resident memory of a workload, measured in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword import LLM
from foreword.batch import InputBatch
from foreword.bench.requests import make
from foreword.bench.serving import greedy, serve
from foreword.engine.observer import EngineObserver
from foreword.errors import EngineError
from foreword.executors import TransferExecutor
from foreword.scheduler import StepPlan

FORMATS = ("auto/bf16", "int8/int8")
_CHILD = "import json, sys; from parts.memory import measured; print(json.dumps(measured(*json.loads(sys.argv[1]))))"


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """Resident memory of a process that loads a model and serves one workload, in 10⁶ bytes.

    peak: the largest while the workload is served, the sum of the next five. loading: the largest before, which is more
    if the weights have to be packed first.
    program: when Foreword is imported: the interpreter, libraries, modules. weights: of the packed file, as far as they
    were read. kv: blocks that requests held, at most at once, times their bytes. model: what else loading takes:
    tokenizer, rows of requests, tensors of steps. steps: the rest: activations, logits, requests and outputs, parts of
    pages.
    """

    formats: str
    workload: str
    peak: float
    program: float
    weights: float
    kv: float
    model: float
    steps: float
    loading: float

    @property
    def over(self) -> float:
        """Return the peak over weights and cache, as a fraction above 1."""
        return self.peak / (self.weights + self.kv) - 1


class _Blocks(EngineObserver):
    """most: the largest number of blocks that requests held at once."""

    def __init__(self) -> None:
        self.most = 0

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self.most = max(self.most, sum(int(table.num_blocks.sum()) for table in batch.states.block_tables))


def run(
    model: str, *, formats: Sequence[str], workloads: Sequence[str], options: Mapping[str, Any]
) -> Iterator[MemoryResult]:
    """Yield the memory of each workload with each pair of formats, "WEIGHTS/CACHE".

    Raise EngineError if a process fails.
    """
    import subprocess  # here: the measured process imports this module, too, and has no use for it

    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    for pair in formats:
        weight_format, _, kv_format = pair.partition("/")
        for workload in workloads:
            given = json.dumps([model, workload, {**options, "weight_format": weight_format, "kv_format": kv_format}])
            environment = {**os.environ, "PYTHONPATH": path}
            command = [sys.executable, "-c", _CHILD, given]
            child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if child.returncode:
                raise EngineError(f"the measured process failed: {child.stderr.strip().splitlines()[-1]}")
            yield MemoryResult(pair, workload, **json.loads(child.stdout.splitlines()[-1]))


def measured(model: str, workload: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the figures of `MemoryResult` of this process, which has done nothing before."""
    program = _resident("VmRSS")
    llm = LLM(model, **options)
    requests = make(workload, vocab_size=llm.engine.states.vocab_size)
    engine, executor = llm.engine, llm.engine.executor
    if not isinstance(executor, TransferExecutor):
        raise EngineError(f"{type(executor).__name__} does not tell the bytes of its blocks")
    loading, model_size = _resident("VmHWM"), _resident("VmRSS") - _packed() - program
    blocks = _Blocks()
    engine.observers.add(blocks)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    serve(engine, requests.prompts, list(map(greedy, requests.output_lens)))
    peak, weights, kv = _resident("VmHWM"), _packed(), blocks.most * executor.block_bytes / 1e6
    found = {"peak": peak, "program": program, "weights": weights, "kv": kv, "model": model_size}
    return {**found, "steps": peak - program - weights - kv - model_size, "loading": loading}


def _resident(name: str) -> float:
    """Return a size of /proc/self/status, in 10⁶ bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def _packed() -> float:
    """Return the resident bytes of files of weights that are mapped, in 10⁶."""
    total, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_weights = line.endswith((".weights", ".gguf", ".safetensors"))
        elif name == "Rss:" and is_weights:
            total += int(rest[0]) * 1024
    return total / 1e6
