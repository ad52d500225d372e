"""Steps on a device: one copy to it, one captured graph, one copy back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol
from warnings import warn

import numpy as np

from foreword.arrays import F32, I32, I64, AnyArray
from foreword.batch import BlockOps, InputBatch, InputBuffers, LoraMapping, PaddingBuckets, RequestStates, make_dummy
from foreword.device.api import DeviceApi, Graph, Tensor
from foreword.device.layout import NO_TOKEN
from foreword.device.ring import PacketSlot
from foreword.device.rows import DeviceRows, TokenTable, compare
from foreword.device.sampling import DeviceSampler
from foreword.errors import ConfigError
from foreword.executors.executor import AdapterStore, BlockStore, Capability, apply_block_ops, check_inputs
from foreword.executors.inputs import TEXT, StepInputs, input_capabilities
from foreword.executors.prompt_logprobs import prompt_tokens, read_prompt_logprobs
from foreword.integers import INT32
from foreword.models.lora import LoraAdapter
from foreword.native import native
from foreword.sampling import BadLogitsError, Sampled, Sampler, StepSampling
from foreword.sampling.sampler import Failure


class DeviceInputs(NamedTuple):
    """The inputs, besides the rows, that few steps have.

    given: its mrope is None where the rotary positions are ``rope_positions`` in every dimension. has_adapters: whether
    some request of the step has an adapter. more_logits: int64 [N], prompt tokens whose logits are wanted after those
    of ``logits_indices``.
    """

    given: StepInputs = TEXT
    has_adapters: bool = False
    more_logits: I64 | None = None

    @property
    def may_be_captured(self) -> bool:
        """Return whether all that it reads is in the rows."""
        return self.given is TEXT and self.more_logits is None


IN_ROWS = DeviceInputs()
"""A step that reads the rows alone."""


class ModelAdapters(AdapterStore, Protocol):
    """The LoRA adapters that a model holds."""

    def mapping(self, batch: InputBatch) -> LoraMapping | None:
        """See `step_adapters`."""


class DeviceModel(BlockStore, Protocol):
    """A forward pass that reads `DeviceRows.tensors`, and keys and values of its own, whose blocks it copies and zeroes
    by launches.

    hidden_size: width of the prompt embeddings that it reads, 0 for none. mrope_dims: dimensions of its M-RoPE
    positions, 0 for none. adapters: None if it runs none.
    """

    @property
    def hidden_size(self) -> int: ...

    @property
    def mrope_dims(self) -> int: ...

    @property
    def adapters(self) -> ModelAdapters | None: ...

    def forward(
        self, rows: DeviceRows, num_tokens: int, num_reqs: int, num_logits: int, inputs: DeviceInputs = IN_ROWS
    ) -> Tensor:
        """Launch a step of these padded sizes. Returns float32 logits: [num_logits, V] at tokens
        ``rows.tensors["logits_indices"][:num_logits]``, then those at ``inputs.more_logits``. It is captured, unless
        ``inputs`` has arrays: it must not read a tensor on the host, and what it allocates belongs to the graph.
        """


class DeviceExecutor:
    """Implements `Executor` for the states of one engine.

    A step is the packet's copy, the replay of a graph that was captured for its padded size (prepare, forward, sample,
    commit to the device's rows), the samples' copy, and an event; `DeviceStep.result` waits for that event. `start`
    captures a graph for each size. Steps with adapters have graphs of their own: a size runs once without one before it
    is captured, as every size does without `start`. After a capture that fails, no other one is tried. Where a row
    needs what the device's sampler lacks (log-probabilities, grammars, processors …), the logits are copied instead,
    the host samples, and the tokens go back: a slower step.

    buckets: the sizes that graphs are captured for; larger steps run without a graph. None: no graphs.
    token_table: see `DeviceRows`.
    """

    extra_size = 0
    reads_gathered_tables = False

    def __init__(
        self,
        model: DeviceModel,
        api: DeviceApi,
        *,
        buckets: PaddingBuckets | None = None,
        token_table: TokenTable = "auto",
    ) -> None:
        self.model, self.api, self.buckets, self.token_table = model, api, buckets, token_table
        self.hidden_size, self.mrope_dims = model.hidden_size, model.mrope_dims
        lora = {Capability.LORA} if model.adapters is not None else set()
        self.capabilities = frozenset(
            {Capability.GRAMMAR} | lora | input_capabilities(self.hidden_size, self.mrope_dims)
        )
        self._host_sampler = Sampler()
        self._rows: DeviceRows | None = None
        self._sampler: DeviceSampler | None = None
        self._padded = lru_cache(4096)(self._find_padded)
        self._sizes = frozenset(() if buckets is None else buckets.graphs())  # that are captured
        self._graphs: dict[tuple[int, int, bool], Graph | None] = {}  # by padded size, and whether with adapters

    def pad_for(self, num_tokens: int, num_reqs: int) -> tuple[int, int] | None:
        """Return the size of the smallest graph that holds the step; None without one."""
        return self._padded(num_tokens, num_reqs)

    def _find_padded(self, num_tokens: int, num_reqs: int) -> tuple[int, int] | None:
        return None if self.buckets is None else self.buckets.pad_for(num_tokens, num_reqs)

    def start(self, states: RequestStates, *, max_num_batched_tokens: int) -> list[str]:
        """See `StartedExecutor.start`: allocates the rows, compiles the kernels and captures a graph for each size."""
        rows, sampler = self._bind(states, max_num_batched_tokens)
        buffers = InputBuffers.for_states(states, max_num_batched_tokens)

        def run(tokens: int, reqs: int) -> None:
            batch = make_dummy(states, buffers, num_tokens=tokens, num_reqs=reqs, gather_block_tables=False)
            slot = rows.send(buffers)
            self._run(rows, sampler, batch, IN_ROWS)
            slot.launched()

        for tokens, reqs in sorted(self._sizes, reverse=True):  # the memory of the largest holds the others
            if tokens <= reqs * states.max_model_len:  # else no step is so large
                run(tokens, reqs)  # without a graph
                run(tokens, reqs)  # captured
        least = 1 + max((tokens for tokens, _ in self._sizes), default=0)
        for tokens in sorted({min(least, max_num_batched_tokens), max_num_batched_tokens}):  # these have no graph
            for reqs in {-(-tokens // states.max_model_len), min(tokens, states.max_num_reqs)}:
                if reqs <= states.max_num_reqs and (tokens, reqs) not in self._sizes:
                    run(tokens, reqs)
        if self.buckets is None:
            return []
        if not self._sizes:
            return ["steps run without graphs, because a capture failed; max_graph_tokens=0 does not try"]
        return [f"{len(self._graphs)} graphs of steps of up to {self.buckets.sizes[-1]} tokens"]

    def runs_ahead(self, sampling: StepSampling) -> bool:
        """Return whether the device samples: then it also commits the samples to its rows."""
        sampler = self._sampler
        return (
            sampler is not None
            and sampling.masks is None
            and not sampling.processors
            and not sampling.step.needs & sampler.lacks
        )

    def launch(self, batch: InputBatch, sampling: StepSampling) -> DeviceStep | HostSampledStep:
        """See `Executor.launch`. Raise ConfigError for a batch of other states than the first one's."""
        states, inputs = batch.states, IN_ROWS
        if states.loras or states.extras or states.has_special_groups:
            check_inputs(batch, self.capabilities)
            inputs = self._inputs(batch)
        rows, sampler = self._rows, self._sampler
        if rows is None or sampler is None or rows.states is not states:
            rows, sampler = self._bind(states, batch.buffers.max_num_batched_tokens)
        if batch.block_ops is not BlockOps.NONE:
            self.apply_block_ops(batch.block_ops)
        slot = rows.send(batch.buffers)
        step = batch.scalars
        num_reqs, reqs, tokens = step.num_reqs, step.num_reqs_padded, step.num_tokens_padded
        if self.runs_ahead(sampling):
            self._run(rows, sampler, batch, inputs)
            self.api.copy(*slot.samples_from(rows.sampled, num_reqs * rows.width))
            slot.launched()
            check = (batch, rows.read_back(batch.buffers)) if batch.check == "full" else None
            return DeviceStep(slot, num_reqs, rows.width, step.num_draft_tokens > 0, check)
        more = prompt_tokens(batch, sampling.step)
        if len(more):
            inputs = inputs._replace(more_logits=more)
        rows.prepare(tokens, reqs)
        logits = self.model.forward(rows, tokens, reqs, step.num_logits, inputs)
        return HostSampledStep(rows, batch, slot, self._host_sampler, sampling, logits, more)

    def apply_block_ops(self, ops: BlockOps) -> None:
        """See `Executor.apply_block_ops`."""
        apply_block_ops(ops, self.model)

    def close(self) -> None:
        """See `Executor.close`: it has no processes."""

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        """See `LoraExecutor.load_lora`. Graphs of steps with adapters are captured anew."""
        size = self._adapters.load(lora_id, adapter)
        self._forget_adapters()
        return size

    def drop_lora(self, lora_id: int) -> None:
        """See `LoraExecutor.drop_lora`."""
        self._adapters.drop(lora_id)
        self._forget_adapters()

    @property
    def _adapters(self) -> ModelAdapters:
        assert self.model.adapters is not None, "the engine refuses adapters without the capability"
        return self.model.adapters

    def _forget_adapters(self) -> None:
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[2]}

    def _inputs(self, batch: InputBatch) -> DeviceInputs:
        """Return what the batch has beside text. The positions of a prompt are known in a batch that is not
        resolved.
        """
        has_adapters = bool(batch.states.loras) and self._adapters.mapping(batch) is not None
        return DeviceInputs(StepInputs.of(batch, self, adds_rope_delta=True), has_adapters)

    def _bind(self, states: RequestStates, max_num_batched_tokens: int) -> tuple[DeviceRows, DeviceSampler]:
        if self._rows is not None:
            raise ConfigError("a DeviceExecutor holds the rows of one engine: make one per engine")
        if self.buckets is not None and self.buckets.sizes[-1] > max_num_batched_tokens:
            raise ConfigError(
                f"max_graph_tokens={self.buckets.sizes[-1]}: a step has at most max_num_batched_tokens="
                f"{max_num_batched_tokens}; use at most that"
            )
        self._rows = DeviceRows(
            states, self.api, max_num_batched_tokens=max_num_batched_tokens, token_table=self.token_table
        )
        self._sampler = DeviceSampler(self._rows)
        return self._rows, self._sampler

    def _run(self, rows: DeviceRows, sampler: DeviceSampler, batch: InputBatch, inputs: DeviceInputs) -> None:
        """Launch the step: without a graph the first time, then captured, then replayed."""
        step = batch.scalars
        tokens, reqs, num_logits = step.num_tokens_padded, step.num_reqs_padded, step.num_logits
        key = tokens, reqs, inputs.has_adapters
        captured = (tokens, reqs) in self._sizes and inputs.may_be_captured
        graph = self._graphs.get(key) if captured else None
        if graph is not None:
            graph.replay()
            return
        if captured:
            num_logits = min(tokens, reqs * rows.width, rows.max_num_logits)  # the most of any step of this size

        def work() -> None:
            rows.prepare(tokens, reqs)
            logits = self.model.forward(rows, tokens, reqs, num_logits, inputs)
            sampler.sample(logits, num_logits=num_logits, num_reqs=reqs)
            rows.commit(reqs)

        if captured and key in self._graphs:
            try:
                graph = self._graphs[key] = self.api.capture(work)
            except RuntimeError as error:  # as by an operator that waits for the device
                self._sizes = frozenset()
                warn(f"steps run without graphs, because a capture failed: {error}", RuntimeWarning, stacklevel=2)
            else:
                graph.replay()
                return
        work()
        if captured:
            self._graphs[key] = None


class DeviceStep:
    """A step of a `DeviceExecutor` in flight, sampled on the device.

    With ``check="full"`` of the batch, what the device prepared is read back at once, and compared with the batch once
    that is resolved; a batch that requests have left is not compared.
    """

    __slots__ = ("__weakref__", "_check", "_has_drafts", "_least", "_num_reqs", "_slot", "_tokens", "_width")

    def __init__(
        self,
        slot: PacketSlot,
        num_reqs: int,
        width: int,
        has_drafts: bool,
        check: tuple[InputBatch, Mapping[str, AnyArray | list[AnyArray]]] | None,
    ) -> None:
        self._slot, self._num_reqs, self._width = slot, num_reqs, width
        self._has_drafts, self._check = has_drafts, check
        self._tokens: I32 | None = None
        self._least = 0  # the smallest of the samples
        slot.keep_for(self)

    def read(self) -> None:
        """See `SampleReader.read`: the slot is about to be used again, or the result is wanted."""
        if self._tokens is None:
            self._slot.wait()
            self._tokens = np.empty(self._num_reqs * self._width, INT32)
            self._least = native.copy_samples(self._slot.sampled_array, self._tokens)

    def result(self) -> Sampled:
        """Wait for the samples."""
        if self._check is not None and (batch := self._check[0]).is_current:
            compare(self._check[1], batch)
        self.read()
        tokens, least = self._tokens, self._least
        assert tokens is not None
        if self._width > 1:
            table = tokens.reshape(-1, self._width)
            tokens = table if self._has_drafts else table[:, 0].copy()
        failures: dict[int, Failure] = {}
        if least == NO_TOKEN:
            failed = tokens.reshape(self._num_reqs, -1)[:, 0] == NO_TOKEN
            failures = dict.fromkeys(failed.nonzero()[0].tolist(), BadLogitsError)
            tokens[tokens == NO_TOKEN] = -1
        return Sampled(tokens, {}, {}, failures, {})


class HostSampledStep:
    """A step of a `DeviceExecutor` in flight, whose logits are sampled on the host."""

    __slots__ = ("_batch", "_logits", "_prompt_tokens", "_rows", "_sampler", "_sampling", "_slot")

    def __init__(
        self,
        rows: DeviceRows,
        batch: InputBatch,
        slot: PacketSlot,
        sampler: Sampler,
        sampling: StepSampling,
        logits: Tensor,
        prompt_tokens: I64,
    ) -> None:
        self._rows, self._batch, self._slot, self._prompt_tokens = rows, batch, slot, prompt_tokens
        self._sampler, self._sampling, self._logits = sampler, sampling, logits

    def result(self) -> Sampled:
        """Sample the logits, and commit the tokens to the device's rows. With ``check="full"`` of the batch, what the
        device prepared is compared with it.
        """
        batch, rows, slot = self._batch, self._rows, self._slot
        if batch.check == "full":
            rows.check(batch)
        logits: F32 = rows.api.to_host(self._logits)
        sampled = self._sampler.sample(batch, logits[: len(batch.logits_indices)], self._sampling)
        table = sampled.token_ids.reshape(batch.num_reqs, -1)
        slot.sampled_array[:] = -1
        slot.sampled_array.reshape(-1, rows.width)[: len(table), : table.shape[1]] = table
        rows.api.copy(rows.tensors["sampled"], slot.sampled)
        rows.commit(batch.num_reqs_padded)
        slot.launched()
        if not len(self._prompt_tokens):
            return sampled
        at = self._prompt_tokens
        return replace(sampled, prompt_logprobs=read_prompt_logprobs(batch, at, logits[-len(at) :], None))
