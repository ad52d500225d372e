"""The protocol of a contender, and Foreword from arrays and from vLLM's scheduler output."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from parts.device import OnDevice

from foreword.batch import InputBatch, prepare_inputs, sampling_metadata
from foreword.batch.adapters.vllm import apply
from foreword.bench.host import Ours, new_states
from foreword.bench.traffic import Step, Workload

Tensors = dict[str, npt.NDArray[np.integer[Any]]]


class Contender(Protocol):
    """The input layer of an engine. take and ready are not timed: they convert a step and its samples into the form
    that the engine works on. output: the step as vLLM's SchedulerOutput. tensors: in the step's order of requests.
    """

    name: str

    def take(self, step: Step, output: Any) -> None: ...
    def prepare(self) -> object: ...
    def tensors(self) -> Tensors: ...
    def ready(self) -> None: ...
    def commit(self) -> object: ...


class FromArrays:
    """Foreword with a scheduler that holds rows, as in `foreword bench host`."""

    name = "foreword arrays"

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._ours = Ours(workload, num_steps, "native")
        self.prepare = self._ours.prepare
        self.ready = self._ours.ready
        self.commit = self._ours.commit

    def take(self, step: Step, output: Any) -> None:
        self._ours.take(step)

    def tensors(self) -> Tensors:
        return _tensors(self._ours.batch)


class WithDevice:
    """Foreword with the packet, copies and launches of a device that does nothing."""

    name = "foreword device"

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._ours = OnDevice(workload, num_steps)
        self.ready = self._ours.ready

    def take(self, step: Step, output: Any) -> None:
        self._ours.take(step)

    def tensors(self) -> Tensors:
        return _tensors(self._ours.batch)

    def prepare(self) -> object:
        batch = self._ours.prepare()
        self._ours.launch()
        return batch

    def commit(self) -> None:
        self._ours.result()
        self._ours.commit()


class Applied:
    """Foreword behind vLLM's scheduler: the adapter applies its SchedulerOutput."""

    name = "foreword apply"

    def __init__(self, workload: Workload) -> None:
        self.states, self.buffers = new_states(workload)

    def take(self, step: Step, output: Any) -> None:
        self.step, self.output = step, output

    def prepare(self) -> object:
        self.batch = prepare_inputs(self.states, apply(self.states, self.output), self.buffers)
        self.sampling = sampling_metadata(self.batch)
        return self.batch

    def tensors(self) -> Tensors:
        return _tensors(self.batch)

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        self.states.commit(self.batch, self.step.sampled)


def _tensors(batch: InputBatch) -> Tensors:
    return {
        "input_ids": batch.input_ids[: batch.num_tokens],
        "positions": batch.positions[: batch.num_tokens],
        "slot_mapping": batch.slot_mapping[0][: batch.num_tokens],
        "query_start_loc": batch.query_start_loc[: batch.num_reqs + 1],
        "seq_lens": batch.seq_lens[: batch.num_reqs],
        "logits_indices": batch.logits_indices,
    }
