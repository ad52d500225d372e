"""Host time of a step on a device: plan and tensors, packet, launch, samples, commit. The device's calls do nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBatch, PaddingBuckets, prepare_inputs, step_needs
from foreword.bench.host import Ours
from foreword.bench.traffic import WORKLOADS, Step, Workload
from foreword.device.api import Tensor
from foreword.device.recording import RecordingDevice
from foreword.device.rows import DeviceRows
from foreword.executors.device import IN_ROWS, DeviceExecutor, DeviceInputs
from foreword.sampling import Processors


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """Medians in µs. prepare: state changes, checked plan, tensors, sampling needs; launch: packet, copies, graph;
    result: the samples; commit: recording them. packet_bytes: the median of what is copied to the device.
    """

    workload: str
    prepare_us: float
    launch_us: float
    result_us: float
    commit_us: float
    step_us: float
    packet_bytes: float


class _Idle(RecordingDevice):
    """Notes the sizes of copies, and does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[Tensor] = []

    def copy(self, to: Tensor, source: Tensor) -> None:
        self.copied.append(source)


class _NoModel:
    hidden_size = mrope_dims = 0
    adapters = None

    def forward(
        self, rows: DeviceRows, num_tokens: int, num_reqs: int, num_logits: int, inputs: DeviceInputs = IN_ROWS
    ) -> Tensor:
        return None

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        pass

    def zero_blocks(self, blocks: I32) -> None:
        pass


class OnDevice(Ours):
    """Foreword with its steps on a device that does nothing. A step is `prepare`, `launch`, `result`, `commit`."""

    def __init__(self, workload: Workload, num_steps: int) -> None:
        super().__init__(workload, num_steps, "native")
        self.device = _Idle()
        reqs = workload.max_num_reqs
        sizes = range(-(-reqs // 4) * (1 + workload.num_drafts), 8193, 64)
        self.executor = DeviceExecutor(_NoModel(), self.device, buckets=PaddingBuckets(sizes, max_num_reqs=reqs))
        self.processors = Processors(self.states)

    def take(self, step: Step) -> None:
        super().take(step)
        self.num_tokens = int(step.num_scheduled.sum())  # a scheduler has it
        self.device.calls.clear()
        self.device.copied.clear()

    def prepare(self) -> InputBatch:
        self.change_rows()
        step = self.step
        pad = self.executor.pad_for(self.num_tokens, len(self.running))
        plan = self.running, step.num_scheduled
        self.batch = batch = prepare_inputs(
            self.states, plan, self.buffers, draft_tokens=step.drafts, pad_to=pad, gather_block_tables=False
        )
        self.step_sampling = self.processors.step(step_needs(batch), None)
        return batch

    def launch(self) -> None:
        self.pending = self.executor.launch(self.batch, self.step_sampling)

    def result(self) -> None:
        self.pending.result()

    def measure(self) -> tuple[int, ...]:
        """Return the times of a step's parts in ns, then the bytes copied to the device."""
        clock = time.perf_counter_ns
        start = clock()
        self.prepare()
        prepared = clock()
        self.launch()
        launched = clock()
        self.result()
        sampled = clock()
        self.commit()
        end = clock()
        num_bytes = sum(source.nbytes for source in self.device.copied[:-1])  # the last one is the samples'
        return prepared - start, launched - prepared, sampled - launched, end - sampled, end - start, num_bytes


def run(*, num_steps: int = 300, workloads: tuple[Workload, ...] = WORKLOADS) -> Iterator[DeviceResult]:
    """Measure each workload. The first tenth of its steps is not counted."""
    for workload in workloads:
        steps, contender = list(workload.steps(num_steps)), OnDevice(workload, num_steps)
        rows = []
        gc.collect()
        gc.disable()
        try:
            for step in steps:
                contender.take(step)
                rows.append(contender.measure())
                contender.ready()
        finally:
            gc.enable()
        medians = np.median(np.array(rows[num_steps // 10 :]), axis=0) / ([1e3] * 5 + [1])
        yield DeviceResult(workload.name, *medians.tolist())
