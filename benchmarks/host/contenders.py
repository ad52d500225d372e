"""Who takes part: the protocol, and Foreword from arrays and from vLLM's scheduler output."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foreword.batch import InputBatch, InputBuffers, KVGroup, RequestStates, prepare_inputs
from foreword.batch.adapters.vllm import apply
from foreword.bench.host import Ours
from foreword.bench.traffic import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_TOKENS, VOCAB_SIZE, Step, Workload

Tensors = dict[str, npt.NDArray[np.integer[Any]]]


class Contender(Protocol):
    """An engine's input layer. take and ready are not timed: they bring a step, and what was sampled in it, into the
    form this engine works on. output: the step as vLLM's SchedulerOutput. tensors: in the step's order of requests.
    """

    name: str

    def take(self, step: Step, output: Any) -> None: ...
    def prepare(self) -> object: ...
    def tensors(self) -> Tensors: ...
    def ready(self) -> None: ...
    def commit(self) -> object: ...


class FromArrays:
    """Foreword where the scheduler holds rows: what `foreword bench host` measures."""

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


class Applied:
    """Foreword behind vLLM's scheduler: its SchedulerOutput through the adapter."""

    name = "foreword apply"

    def __init__(self, workload: Workload) -> None:
        self.states = RequestStates(
            max_num_reqs=workload.max_num_reqs,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            kv_groups=[KVGroup(block_size=BLOCK_SIZE)],
            max_num_draft_tokens=workload.num_drafts,
        )
        self.buffers = InputBuffers.for_states(self.states, MAX_NUM_TOKENS)

    def take(self, step: Step, output: Any) -> None:
        self.step, self.output = step, output

    def prepare(self) -> object:
        self.batch = prepare_inputs(self.states, apply(self.states, self.output), self.buffers)
        self.sampling = self.batch.sampling_metadata()
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
