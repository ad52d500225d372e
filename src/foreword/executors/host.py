"""The base of executors whose logits are in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from foreword.arrays import F32, I32, I64, U8
from foreword.batch import BlockOps, InputBatch, prefilling_with
from foreword.errors import PlanError
from foreword.executors.executor import (
    AdapterStore,
    BlockStore,
    Capability,
    TransferStore,
    apply_block_ops,
    check_inputs,
)
from foreword.executors.inputs import StepInputs, input_capabilities
from foreword.executors.pooling import Pooler
from foreword.executors.prompt_logprobs import NO_TOKENS, prompt_tokens, read_prompt_logprobs
from foreword.models.lora import LoraAdapter
from foreword.sampling import Sampled, Sampler, StepSampling


class HostExecutor(ABC):
    """Implements `Executor` from `compute` and `copy_blocks`, with a `Sampler` of its own.

    A step is computed in `HostStep.result`, by the calling thread. maps_weights: its weights are in a mapped file, so
    that executors of the same file share their memory.
    """

    capabilities: frozenset[Capability] = frozenset({Capability.GRAMMAR})
    hidden_size: int = 0
    extra_size: int = 0
    mrope_dims: int = 0
    reads_gathered_tables: bool = True
    maps_weights: bool = False

    def __init__(self, sampler: Sampler | None = None, *, pooler: Pooler | None = None) -> None:
        """Take the sampler, and the pooler of requests that pool the states from `hidden_states`."""
        self.sampler, self.pooler = sampler or Sampler(), pooler

    @abstractmethod
    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """Compute the batch, write its keys and values, and return the logits [L, V] at tokens ``logits_indices``.

        logits_indices: int64 [L], the batch's own and, after these, prompt tokens whose log-probabilities are wanted.
        The logits stay valid until the next call.
        """

    @abstractmethod
    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Copy whole blocks in every layer. All sources are read before any destination is written."""

    def hidden_states(self, tokens: I64) -> F32:
        """Return the hidden states [N, hidden] after the final norm at tokens of the last `compute`, until the next
        call.
        """
        raise PlanError(f"{type(self).__name__} has no hidden states", tensor="pooling_params", got=len(tokens))

    def draw(self, batch: InputBatch, sampling: StepSampling) -> Sampled:
        """Compute the batch and sample it."""
        return self.sampler.sample(batch, self.compute(batch, batch.logits_indices), sampling)

    def zero_blocks(self, blocks: I32) -> None:
        """Fill whole blocks with zeros in every layer."""
        raise PlanError(f"{type(self).__name__} cannot zero blocks", tensor="block_ops.zero", got=blocks.tolist())

    def pad_for(self, num_tokens: int, num_reqs: int) -> tuple[int, int] | None:
        """Return None, because a step needs no padding."""
        return None

    def runs_ahead(self, sampling: StepSampling) -> bool:
        """Return False, because the samples of a step are in host memory."""
        return False

    def launch(self, batch: InputBatch, sampling: StepSampling) -> HostStep:
        check_inputs(batch, self.capabilities)
        if batch.block_ops is not BlockOps.NONE:
            self.apply_block_ops(batch.block_ops)
        return HostStep(self, batch, sampling)

    def close(self) -> None:  # noqa: B027 (few executors have processes)
        """See `Executor.close`: it has no processes."""

    def apply_block_ops(self, ops: BlockOps) -> None:
        apply_block_ops(ops, self)


class AdaptedExecutor(HostExecutor):
    """A `HostExecutor` whose LoRA adapters are in ``adapters``."""

    adapters: AdapterStore

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        return self.adapters.load(lora_id, adapter)

    def drop_lora(self, lora_id: int) -> None:
        self.adapters.drop(lora_id)


class PagedExecutor(AdaptedExecutor):
    """An `AdaptedExecutor` whose blocks are in ``cache``.

    given: inputs of the next step in place of those of its requests; None: theirs.
    """

    given: StepInputs | None = None

    cache: BlockStore

    def __init__(
        self,
        cache: BlockStore,
        adapters: AdapterStore,
        sampler: Sampler | None = None,
        *,
        pooler: Pooler | None = None,
        hidden_size: int = 0,
        extra_size: int = 0,
        mrope_dims: int = 0,
        prefix_lm: bool = False,
    ) -> None:
        """Declare the inputs that the model reads; `Executor` explains hidden_size, extra_size and mrope_dims, and
        `DecoderSpec` prefix_lm.
        """
        super().__init__(sampler, pooler=pooler)
        self.cache, self.adapters = cache, adapters
        self.hidden_size, self.extra_size, self.mrope_dims = hidden_size, extra_size, mrope_dims
        self.capabilities |= input_capabilities(hidden_size, mrope_dims, prefix_lm=prefix_lm)

    def inputs_of(self, batch: InputBatch) -> StepInputs:
        """Return the inputs of a step beside its tokens. Errors are those of `StepInputs.of`."""
        return StepInputs.of(batch, self) if self.given is None else self.given

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        self.cache.copy_blocks(sources, destinations)

    def zero_blocks(self, blocks: I32) -> None:
        self.cache.zero_blocks(blocks)


class TransferPagedExecutor(PagedExecutor):
    """A `PagedExecutor` whose blocks can be kept outside the pool: see `TransferExecutor`. num_blocks, num_states: see
    `PoolSize`.
    """

    cache: TransferStore
    num_blocks: int
    num_states: int = 0
    capabilities = PagedExecutor.capabilities | {Capability.BLOCK_TRANSFER}

    @property
    @abstractmethod
    def block_layout(self) -> str:
        """See `TransferExecutor`."""

    @property
    def block_bytes(self) -> int:
        return self.cache.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.cache.state_bytes

    def read_blocks(self, blocks: I32) -> U8:
        is_state = self.num_states and len(blocks) and blocks[0] >= self.num_blocks
        data = np.empty((len(blocks), self.state_bytes if is_state else self.block_bytes), np.uint8)
        self.cache.read_blocks(blocks, data)
        return data

    def write_blocks(self, blocks: I32, data: U8) -> None:
        self.cache.write_blocks(blocks, data)


class HostStep:
    """A step of a `HostExecutor`, computed when its result is asked for."""

    __slots__ = ("_batch", "_executor", "_sampling")

    def __init__(self, executor: HostExecutor, batch: InputBatch, sampling: StepSampling) -> None:
        self._executor, self._batch, self._sampling = executor, batch, sampling

    def result(self) -> Sampled:
        """Compute, sample, and pool."""
        executor, batch = self._executor, self._batch
        by_row = batch.states.extras.pooling_params
        pooling = prefilling_with(by_row, batch) if by_row else []
        if not pooling:
            return self._sampled()
        if len(pooling) == batch.num_reqs:
            executor.compute(batch, NO_TOKENS)
            sampled = Sampled(np.full(batch.num_reqs, -1, np.int32), {})
        else:
            sampled = self._sampled()
            sampled.token_ids[pooling] = -1
        assert executor.pooler is not None, "the engine refuses pooling requests without the capability"
        pooled, failures = executor.pooler.pool(batch, executor.hidden_states)
        return replace(sampled, pooled=pooled, failures={**sampled.failures, **failures})

    def _sampled(self) -> Sampled:
        executor, batch, sampling = self._executor, self._batch, self._sampling
        tokens = prompt_tokens(batch, sampling.step)
        if not len(tokens):
            return executor.draw(batch, sampling)
        own = batch.logits_indices
        logits = executor.compute(batch, np.concatenate([own, tokens]))
        sampled = executor.sampler.sample(batch, logits[: len(own)], sampling)
        found = read_prompt_logprobs(batch, tokens, logits[len(own) :], executor.sampler.threads)
        return replace(sampled, prompt_logprobs=found)
