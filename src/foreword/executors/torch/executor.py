"""The torch executor of decoders: a model's own forward pass in PyTorch, on a CPU or a CUDA device."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from foreword.arrays import F32, I64, AnyArray
from foreword.batch import InputBatch
from foreword.errors import ConfigError
from foreword.executors.executor import Capability
from foreword.executors.host import TransferPagedExecutor
from foreword.executors.inputs import last_seen
from foreword.executors.option_types import TorchKeywords
from foreword.executors.options import TorchOptions
from foreword.executors.pooling import Pooler
from foreword.executors.torch.cache import KVLayer, PagedCache, StateLayer
from foreword.executors.torch.decoder import Decoder, paged_mixer
from foreword.executors.torch.kernel_attention import paged_attention
from foreword.executors.torch.loras import Loras
from foreword.executors.torch.options import check_compiler, device_of, dtype_of, use_threads
from foreword.executors.torch.rotation import Rotaries
from foreword.executors.torch.shard import Shards
from foreword.executors.torch.step import PagedStep, RecurrentStep, growth_factors, query_growths
from foreword.executors.torch.tensors import as_floats, as_tensor
from foreword.executors.torch.weights import Loader
from foreword.models.pooling import PoolingSpec
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights


class TorchExecutor(TransferPagedExecutor):
    """Runs ``spec`` with ``weights`` under `TorchOptions`. Samples on the host.

    num_blocks, block_size: the KV pool; block ids are shared by all KV groups and block 0 is the null block.
    num_states: slots for states of recurrent layers, whose ids follow those of the blocks; 0: states are in blocks.
    pooling: of pooling requests; None: the last token, without a head.
    shards: the part of the model that this process computes; None: all of it.
    torch.compile leaves out attention, recurrent layers and steps with adapters. Threads are those of PyTorch's
    operators, in the whole process.

    Weights are read matrix by matrix, dequantised to ``dtype``; afterwards no file is read. Raise ModelError if it
    changed. Raise ConfigError for a device that this machine lacks, for a weight_format that PyTorch or the model
    lacks, and without the compiler that torch.compile needs. Raise MemoryError if the KV pool does not fit.
    """

    cache: PagedCache
    adapters: Loras
    capabilities = TransferPagedExecutor.capabilities | {
        Capability.LORA, Capability.POOLING, Capability.RECURRENT_STATE, Capability.DRAFTED_STATES,
    }  # fmt: skip

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        pooling: PoolingSpec | None = None,
        shards: Shards | None = None,
        **options: Unpack[TorchKeywords],
    ) -> None:
        given = TorchOptions(**options)
        self.spec, self.shards = spec, shards or Shards()
        self.num_blocks, self.block_size, self.num_states = num_blocks, block_size, num_states
        if given.num_ranks != self.shards.all.size:
            raise ConfigError(f"the model is divided among {given.num_ranks} processes; use `ParallelExecutor`")
        use_threads(given.num_threads)
        if given.compile:
            check_compiler()
        dtype = dtype_of(given.dtype, weights)
        load = Loader(weights, device_of(given.device), dtype, self.shards, given.weight_format)
        own = self.shards.spec(spec)
        self.device, self.dtype, self.weight_format = load.device, load.dtype, given.weight_format
        self.decoder = Decoder(own, load, partial(paged_mixer, compile=given.compile), compile=given.compile)
        attention, recurrent = cache_layers(own)
        cache = PagedCache(
            attention,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=load.dtype,
            device=load.device,
            recurrent=recurrent,
            num_states=num_states,
        )
        super().__init__(
            cache,
            Loras(self.decoder.products, load.device, load.dtype),
            pooler=Pooler(pooling or PoolingSpec(), weights),
            hidden_size=spec.hidden_size,
            mrope_dims=spec.mrope_dims,
            prefix_lm=spec.prefix_lm,
        )
        self.attention = paged_attention(cache, load.shards.positions)
        self._rotaries = Rotaries(
            {layer.rope: own.heads_of(layer).head_dim for layer in own.layers if layer.rope is not None}, load.device
        )
        self._growths = query_growths(own)
        self._last = torch.zeros(0, spec.hidden_size, dtype=load.dtype, device=load.device)

    @property
    def block_layout(self) -> str:
        return f"torch {self.device.type} {self.dtype} weights {self.weight_format}"

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """See `HostExecutor.compute`. Raise PlanError for a number without an adapter; nothing was written then."""
        with torch.inference_mode():
            own = self.own_logits(batch, logits_indices)
            return as_floats(self.shards.all.gather(own, self.spec.vocab_size))

    def own_logits(self, batch: InputBatch, logits_indices: I64) -> Tensor:
        """Compute the logits of this rank's part of the vocabulary, without those of other ranks."""
        step = self._step(batch)
        self._last = self.decoder.forward(step)
        if not self.spec.has_logits:
            return self._last.new_empty(0, len(self.shards.all.part(self.spec.vocab_size)))
        return self.decoder.logits(self._last, self._tensor(logits_indices), step.loras)

    def hidden_states(self, tokens: I64) -> F32:
        """See `HostExecutor.hidden_states`."""
        with torch.inference_mode():
            return as_floats(self.decoder.hidden_states(self._last[self._tensor(tokens)]))

    def _step(self, batch: InputBatch) -> PagedStep:
        self.attention.begin(batch, last_seen(batch))
        given, T, tensor = self.inputs_of(batch), batch.num_tokens, self._tensor
        positions, mrope = tensor(batch.positions[:T]), None if given.mrope is None else tensor(given.mrope)
        return PagedStep(
            tensor(batch.input_ids[:T]),
            positions,
            None if given.embeds is None else (tensor(given.embeds[0]), tensor(given.embeds[1])),
            self.adapters.of_step(batch),
            self.attention,
            self._rotaries.at(positions, self.dtype, mrope),
            RecurrentStep(batch, self.cache, self.device) if self.spec.num_state_slots else None,
            {growth: growth_factors(growth, positions, self.dtype) for growth in self._growths},
        )

    def _tensor(self, array: AnyArray) -> Tensor:
        return as_tensor(array, self.device)


def cache_layers(spec: DecoderSpec) -> tuple[list[KVLayer], list[StateLayer]]:
    """Return what the layers with attention keep in the cache, and what the recurrent ones keep, in their order."""
    place = spec.places()
    writing = [(i, layer) for i, layer in enumerate(spec.layers) if layer.has_attention and layer.reads_layer is None]
    shapes = [(place[i], spec.heads_of(layer)) for i, layer in writing]
    index_dims = [0 if layer.takes_chosen else spec.index_size for _, layer in writing]
    return (
        [
            KVLayer(*at, of.num_kv_heads, of.head_dim, of.value_dim, spec.mla is not None, index_dim)
            for (at, of), index_dim in zip(shapes, index_dims, strict=True)
        ],
        [StateLayer(*place[i], layer.recurrent.state_size) for i, layer in enumerate(spec.layers) if layer.recurrent],
    )
