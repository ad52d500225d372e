"""Models that the transformers library loads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from foreword.engine.config import EngineConfig
from foreword.engine.memory import HostMemory, host_memory
from foreword.engine.model import Model
from foreword.engine.pool import default_pool_bytes, pool_of, request_length
from foreword.errors import ConfigError
from foreword.executors import Executor
from foreword.executors.kinds import TRANSFORMERS
from foreword.executors.options import TransformersOptions
from foreword.executors.pool import PoolSize, batch_groups
from foreword.executors.torch.cache import slot_sizes
from foreword.executors.transformers.encoder_decoder import EncoderDecoderExecutor, cross_bytes
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.model import LoadedEncoderDecoder, LoadedOwnCache, LoadedTransformers
from foreword.executors.transformers.own_cache import OwnCacheExecutor
from foreword.machine import own_memory_bytes
from foreword.media.encoder import Media
from foreword.media.limits import MediaLimits
from foreword.models.generation_files import read_suggestions
from foreword.models.lora import read_lora_by_names
from foreword.sampling.generation_rules import GenerationProcessor

_VECTORS_PER_TOKEN = 8  # as wide as the widest matrix's input, that a layer of such a model holds at a time
T = TypeVar("T", bound=LoadedTransformers)


class TransformersModel(Model[T]):
    """A causal model of transformers, whose layers may differ in their keys and values."""

    options: TransformersOptions

    def __init__(self, loaded: T, options: TransformersOptions) -> None:
        super().__init__(loaded, TRANSFORMERS, options)
        self.vocab_size, self.generates = loaded.trace.vocab_size, loaded.generates
        self.prefix_lm = getattr(loaded.module.config, "prefix_lm", False)
        self.read_lora = partial(read_lora_by_names, layers=loaded.trace.linear)
        self.suggested = read_suggestions(loaded.path)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.loaded.module.parameters())

    def memory(self, config: EngineConfig) -> HostMemory | None:
        """See `Model.memory`. The weights are a part of the process already, unless they are read from their file when
        used.
        """
        loaded = self.loaded
        if not self.options.is_on_host:
            return None
        num_tokens, widest = (
            config.scheduler.max_num_batched_tokens,
            max(w.shape[-1] for w in loaded.module.parameters()),
        )
        memory = host_memory(
            config,
            weights=self.weight_bytes,
            activations=_VECTORS_PER_TOKEN * 4 * widest * num_tokens,
            vocab_size=self.vocab_size if self.generates else 0,
            length=config.max_model_len or loaded.max_model_len,
            num_groups=len(loaded.trace.kv_groups()),
        )
        return None if memory is None else memory.beside("process", max(0, own_memory_bytes() - self.weight_bytes))

    def pool(self, config: EngineConfig, memory: HostMemory | None = None) -> PoolSize:
        loaded = self.loaded
        length = request_length(loaded.max_model_len, loaded.max_model_len, config)
        dtype = loaded.module.dtype
        block_bytes = sum(slot_sizes(loaded.trace.layers, config.block_size, dtype)) * dtype.itemsize
        return pool_of(length, batch_groups(loaded.trace, config.block_size), block_bytes, config, memory)

    def executor(self, size: PoolSize) -> Executor:
        loaded = self.loaded
        return TransformersExecutor(
            loaded.module,
            loaded.trace,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            **loaded.inputs._asdict(),
            prefix_lm=self.prefix_lm,
            compile=self.options.compile,
            pooling=loaded.pooling,
        )

    def media(self, limits: MediaLimits) -> Media:
        return Media(self.loaded.media, self.loaded.refused, limits)


class OwnCacheModel(TransformersModel[LoadedOwnCache]):
    """A causal model of transformers whose requests have caches of its own: a block is the place of a whole one."""

    def __init__(self, loaded: LoadedOwnCache, options: TransformersOptions) -> None:
        super().__init__(loaded, options)
        self.read_lora = None

    def pool(self, config: EngineConfig, memory: HostMemory | None = None) -> PoolSize:
        loaded = self.loaded
        length = request_length(loaded.max_model_len, loaded.max_model_len, config)
        groups = batch_groups(loaded.trace, config.block_size)
        return pool_of(length, groups, loaded.trace.cache_bytes(length), config, memory)

    def executor(self, size: PoolSize) -> Executor:
        loaded = self.loaded
        return OwnCacheExecutor(loaded.module, loaded.trace, num_blocks=size.num_blocks, block_size=size.block_size)


class EncoderDecoderModel(TransformersModel[LoadedEncoderDecoder]):
    """An encoder–decoder of transformers."""

    def __init__(self, loaded: LoadedEncoderDecoder, options: TransformersOptions) -> None:
        super().__init__(loaded, options)
        self.encoder = loaded.encoder
        if loaded.encoder.rules or loaded.encoder.speech is not None:
            self.processors = (partial(GenerationProcessor, rules=loaded.encoder.rules),)

    @property
    def _cross_bytes(self) -> int:
        """The bytes of the encoder's keys and values of one request."""
        return cross_bytes(self.loaded.trace, self.loaded.encoder.max_len, self.loaded.module.dtype)

    def memory(self, config: EngineConfig) -> HostMemory | None:
        memory, size = super().memory(config), config.scheduler.max_num_seqs * self._cross_bytes
        return None if memory is None else memory.beside("cross-attention", size)

    def configured(self, config: EngineConfig) -> EngineConfig:
        """Return settings with as many requests at a time as cross-attention has places for in half of kv_cache_bytes.

        Raise ConfigError if not even one request fits.
        """
        one = self._cross_bytes
        pool_bytes = default_pool_bytes(config, super().memory(config), 4 * one)
        count = min(config.scheduler.max_num_seqs, pool_bytes // 2 // one)
        if count < 1:
            raise ConfigError(
                f"kv_cache_bytes={pool_bytes}: the encoder's keys and values of a request need {one}, at "
                f"most half of it; give at least {2 * one}"
            )
        limits = replace(config.scheduler, max_num_seqs=count)
        return replace(config, scheduler=limits, kv_cache_bytes=pool_bytes - count * one)

    def executor(self, size: PoolSize) -> Executor:
        loaded = self.loaded
        return EncoderDecoderExecutor(
            loaded.module,
            loaded.trace,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            max_encoder_len=loaded.encoder.max_len,
            max_num_seqs=size.max_num_seqs,
        )

    def media(self, limits: MediaLimits) -> Media:
        return Media(self.loaded.media, self.loaded.refused, limits, self.loaded.encoder.speech)


def transformers_model(loaded: LoadedTransformers, options: TransformersOptions) -> Model[Any]:
    """Return the model of what transformers loaded."""
    if isinstance(loaded, LoadedEncoderDecoder):
        return EncoderDecoderModel(loaded, options)
    if isinstance(loaded, LoadedOwnCache):
        return OwnCacheModel(loaded, options)
    return TransformersModel(loaded, options)
