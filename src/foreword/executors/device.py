"""Steps on a device: one copy to it, one captured graph, one copy back."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from foreword.arrays import F32, I32
from foreword.batch import BlockOps, InputBatch, PaddingBuckets
from foreword.batch.state.sampling_columns import Need
from foreword.batch.step.tensors import buffers_of
from foreword.device.api import DeviceApi, Graph, Tensor
from foreword.device.ring import PacketSlot
from foreword.device.rows import DeviceRows
from foreword.device.sampling import DeviceSampler
from foreword.errors import ConfigError
from foreword.executors.executor import Capability, check_inputs
from foreword.sampling import BadLogitsError, Sampled, Sampler, StepSampling
from foreword.sampling.sampler import Failure


class DeviceModel(Protocol):
    """A forward pass that reads `DeviceRows.tensors`, and keys and values of its own."""

    def forward(self, rows: DeviceRows, num_tokens: int, num_reqs: int, num_logits: int) -> Tensor:
        """Launch a step of these padded sizes. The logits [num_logits, V] at tokens
        ``rows.tensors["logits_indices"][:num_logits]``. It is captured: it must not read a tensor on the host, and what
        it allocates belongs to the graph.
        """
        ...

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Launch copies of whole blocks in every layer. All sources are read before any destination is written."""
        ...

    def zero_blocks(self, blocks: I32) -> None:
        """Launch filling whole blocks with zeros in every layer."""
        ...


class DeviceExecutor:
    """Implements `Executor` for the states of one engine.

    A step is the packet's copy, the replay of a graph that was captured for its padded size (prepare, forward, sample,
    commit to the device's rows), the samples' copy, and an event; `DeviceStep.result` waits for that event. A size runs
    once without a graph before it is captured. Where a row needs what the device's sampler lacks (log-probabilities,
    grammars, processors …), the logits are copied instead, the host samples, and the tokens go back: a slower step.

    buckets: the sizes that graphs are captured for; larger steps run without a graph.
    """

    hidden_size = 0
    mrope_dims = 0
    reads_gathered_tables = False
    capabilities: frozenset[Capability] = frozenset({Capability.GRAMMAR})

    def __init__(self, model: DeviceModel, api: DeviceApi, *, buckets: PaddingBuckets | None = None) -> None:
        self.model, self.api, self.buckets = model, api, buckets
        self._host_sampler = Sampler()
        self._rows: DeviceRows | None = None
        self._sampler: DeviceSampler | None = None
        self._graphs: dict[tuple[int, int, bool], Graph | None] = {}
        self._logits: Tensor = None

    def pad_for(self, num_tokens: int, num_reqs: int) -> tuple[int, int] | None:
        """The size of the smallest graph that holds the step; None without one."""
        if self.buckets is None:
            return None
        decode_len = num_tokens // num_reqs if num_reqs else 0
        is_uniform = decode_len > 0 and decode_len * num_reqs == num_tokens
        return self.buckets.pad_for(num_tokens, num_reqs, decode_len if is_uniform else None)

    def launch(self, batch: InputBatch, sampling: StepSampling) -> DeviceStep:
        """See `Executor.launch`. ConfigError for a batch of other states than the first one's."""
        check_inputs(batch, self.capabilities)
        rows, sampler = self._bound(batch)
        self.apply_block_ops(batch.block_ops)
        on_host = (
            sampling.masks is not None
            or bool(sampling.processors)
            or not sampler.supports(Need(sampling.metadata.needs))
        )
        slot = rows.send(buffers_of(batch))
        tokens, reqs = batch.num_tokens_padded, batch.num_reqs_padded
        self._run(rows, sampler, tokens, reqs, on_host)
        if not on_host:
            size = batch.num_reqs * rows.width
            self.api.copy(slot.sampled[:size], rows.tensors["sampled"][:size])
            slot.launched()
        return DeviceStep(self, batch, sampling, slot, on_host)

    def apply_block_ops(self, ops: BlockOps) -> None:
        """See `Executor.apply_block_ops`."""
        if len(ops.zero):
            self.model.zero_blocks(ops.zero)
        if len(ops.copies):
            self.model.copy_blocks(ops.copies[:, 0].copy(), ops.copies[:, 1].copy())

    def _bound(self, batch: InputBatch) -> tuple[DeviceRows, DeviceSampler]:
        if self._rows is None or self._sampler is None:
            tokens = buffers_of(batch).max_num_batched_tokens
            self._rows = DeviceRows(batch.states, self.api, max_num_batched_tokens=tokens)
            self._sampler = DeviceSampler(self._rows)
        if self._rows.states is not batch.states:
            raise ConfigError("a DeviceExecutor holds the rows of one engine: make one per engine")
        return self._rows, self._sampler

    def _run(self, rows: DeviceRows, sampler: DeviceSampler, tokens: int, reqs: int, on_host: bool) -> None:
        """Launch the step: without a graph the first time, then captured, then replayed."""

        def work() -> None:
            num_logits = min(tokens, reqs * rows.width, rows.max_num_logits)
            rows.prepare(tokens, reqs)
            logits = self.model.forward(rows, tokens, reqs, num_logits)
            if on_host:
                self._logits = logits
            else:
                sampler.sample(logits, num_logits=num_logits, num_reqs=reqs)
                rows.commit(reqs)

        size = tokens, reqs, on_host
        if on_host or self.buckets is None or tokens > self.buckets.sizes[-1]:
            work()
        elif size not in self._graphs:
            work()
            self._graphs[size] = None
        else:
            graph = self._graphs[size]
            if graph is None:
                graph = self._graphs[size] = self.api.capture(work)
            graph.replay()

    def sample_on_host(self, batch: InputBatch, sampling: StepSampling, slot: PacketSlot) -> Sampled:
        """Sample the logits of the step just launched on the host, and commit its tokens to the device's rows."""
        rows = self._bound(batch)[0]
        logits: F32 = np.ascontiguousarray(_host(self._logits)[: len(batch.logits_indices)], np.float32)
        sampled = self._host_sampler.sample(batch, logits, sampling)
        table = sampled.token_ids.reshape(batch.num_reqs, -1)
        slot.sampled_array[:] = -1
        slot.sampled_array.reshape(-1, rows.width)[: len(table), : table.shape[1]] = table
        self.api.copy(rows.tensors["sampled"], slot.sampled)
        rows.commit(batch.num_reqs_padded)
        slot.launched()
        return sampled

    def check(self, batch: InputBatch) -> None:
        """Compare the step that the device prepared last with the batch. See `DeviceRows.check`."""
        self._bound(batch)[0].check(batch)


class DeviceStep:
    """A step of a `DeviceExecutor` in flight."""

    __slots__ = ("_batch", "_executor", "_on_host", "_sampling", "_slot")

    def __init__(
        self, executor: DeviceExecutor, batch: InputBatch, sampling: StepSampling, slot: PacketSlot, on_host: bool
    ) -> None:
        self._executor, self._batch, self._sampling, self._slot = executor, batch, sampling, slot
        self._on_host = on_host

    def result(self) -> Sampled:
        """Wait for the samples. With ``check="full"`` of the batch, what the device prepared is compared with it."""
        batch, slot = self._batch, self._slot
        if batch._check == "full":
            self._executor.check(batch)
        if self._on_host:
            return self._executor.sample_on_host(batch, self._sampling, slot)
        slot.wait()
        width = len(slot.sampled_array) // batch.states.max_num_reqs
        table = slot.sampled_array[: batch.num_reqs * width].reshape(-1, width)
        tokens = table.copy() if len(batch.draft_token_ids) else table[:, 0].copy()
        return Sampled(tokens, {}, failures=_failures(batch, table[:, 0]))


def _failures(batch: InputBatch, first: I32) -> dict[int, Failure]:
    """The requests whose logits gave no token; not those whose token is discarded."""
    failed = first < 0
    if not failed.any():
        return {}
    samples = batch.seq_lens[: len(first)] - batch.num_draft_tokens >= batch.states.num_tokens[batch.idx_mapping]
    return dict.fromkeys((failed & samples).nonzero()[0].tolist(), BadLogitsError)


def _host(values: Tensor) -> F32:
    array: F32 = values.float().cpu().numpy() if hasattr(values, "cpu") else values
    return array
