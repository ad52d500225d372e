"""The type of all models that an engine serves, and those of Foreword's own loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from foreword.batch import KVGroup, RequestStates
from foreword.engine.config import SET_METHOD, EngineConfig
from foreword.engine.loras import ReadLora
from foreword.engine.memory import HostMemory, host_memory
from foreword.engine.pool import pool_of, pool_size, request_length
from foreword.engine.prompt import EncoderPrompts
from foreword.errors import ConfigError
from foreword.executors import Executor
from foreword.executors.kinds import KINDS, ExecutorKind
from foreword.executors.options import ExecutorOptions
from foreword.executors.pool import PoolSize
from foreword.media.encoder import Media
from foreword.media.limits import MediaLimits
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.generation_files import Suggestions
from foreword.models.loader import LoadedModel
from foreword.models.lora import read_encoder_lora, read_lora
from foreword.models.next_token import NextTokenHead
from foreword.models.pooling import PoolingSpec
from foreword.models.spec import DecoderSpec
from foreword.sampling import LogitsProcessor
from foreword.settings import check_not_given, check_of_encoder

if TYPE_CHECKING:
    from foreword.executors.transformers.model import LoadedTransformers  # which needs transformers

OF_PARTS = frozenset({"long_prefill_threshold", "prompt_time_share", "host_cache_bytes", "cache_dir", "cache_bytes"})
"""Settings of parts of texts, which a decoder whose tokens see later ones refuses."""
OF_WHOLE = frozenset({"prefix_caching", "chunked_prefill"})
"""Settings that a model of whole texts has not as True."""
_WHOLE = "the model computes whole texts, of which no part is computed or kept alone"
ProcessorFactory = Callable[[RequestStates], LogitsProcessor]
"""Makes a logits processor over the rows of an engine."""
L = TypeVar("L", bound="LoadedModel | LoadedTransformers")


class Model(ABC, Generic[L]):
    """A loaded model and the kind of executor that runs it.

    loaded: what the loader read. options: of the executor. vocab_size: number of token ids. generates: False if it
    computes no logits. prefix_lm: whether the tokens of a prompt see each other. encoder: reads the prompts of an
    encoder–decoder. read_lora: reads an adapter of the model; None if it takes none. processors: logits processors that
    belong to the model. suggested: sampling, to requests.
    """

    vocab_size: int
    generates: bool = True
    prefix_lm: bool = False
    encoder: EncoderPrompts | None = None
    read_lora: ReadLora | None = None
    processors: Sequence[ProcessorFactory] = ()
    suggested: Suggestions = Suggestions()

    def __init__(self, loaded: L, kind: ExecutorKind[Any], options: ExecutorOptions) -> None:
        self.loaded, self.kind, self.options = loaded, kind, options
        self.name, self.path, self.tokenizer = loaded.name, loaded.path, loaded.tokenizer
        self.eos_token_ids, self.pooling, self.weights = loaded.eos_token_ids, loaded.pooling, loaded.weights

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, to which the time of a step of a small batch is proportional."""
        return sum(tensor.stored.nbytes for tensor in self.weights.values())

    def configured(self, config: EngineConfig) -> EngineConfig:
        """Return the settings as an engine for this model needs them.

        Raise ConfigError for those that it cannot have.
        """
        return config.resolved(never_drafts=self._never_drafts)

    @property
    def _never_drafts(self) -> str | None:
        """Return why there is no speculation by default, and what to do about it; None if there is."""
        reason = f"executor={self.kind.name!r} does not speculate by default; {SET_METHOD}"
        return None if self.kind.speculates else reason

    def memory(self, config: EngineConfig) -> HostMemory | None:
        """Return the memory of the host beside a new executor's KV pool, under settings that `configured` returned.

        None if the pool is not in the host's memory, or if the memory is not known.
        """
        return None

    def weights_key(self, config: EngineConfig) -> str | None:
        """Return what tells weights whose memory engines of several models share from others; None if this one's are
        its own.
        """
        return None

    @abstractmethod
    def pool(self, config: EngineConfig, memory: HostMemory | None = None) -> PoolSize:
        """Return the KV pool under settings that `configured` returned, within `memory`.

        Raise ConfigError if no request fits into it, or if it does not fit into the memory.
        """

    @abstractmethod
    def executor(self, size: PoolSize) -> Executor:
        """Return a new executor with such a pool. Errors are those of the executor."""

    def media(self, limits: MediaLimits) -> Media:
        """Return what it takes besides text."""
        return Media(limits=limits)


class DecoderModel(Model[LoadedModel]):
    """A decoder of Foreword's own loader."""

    def __init__(self, loaded: LoadedModel, kind: ExecutorKind[Any], options: ExecutorOptions) -> None:
        super().__init__(loaded, kind, options)
        self.spec: DecoderSpec = loaded.decoder
        self.vocab_size, self.generates = self.spec.vocab_size, self.spec.has_logits
        self.prefix_lm = self.spec.prefix_lm
        self.suggested = loaded.generation.suggested
        if loaded.family is not None:
            self.read_lora = partial(read_lora, spec=self.spec, family=loaded.family)
        if not (self.spec.is_causal or kind.sees_later):
            reason = "the model's tokens see later ones, which this executor does not compute"
            raise ConfigError(f"executor={kind.name!r}: {reason}; use {_SEEING}")
        if (never := loaded.generation).suppressed or never.suppressed_first:
            from foreword.sampling.generation_rules import GenerationProcessor, GenerationRules  # few models have rules

            rules = GenerationRules(never.suppressed, never.suppressed_first)
            self.processors = (partial(GenerationProcessor, rules=rules),)

    def configured(self, config: EngineConfig) -> EngineConfig:
        config = config.resolved(never_drafts=self._never_drafts, prefers_async=self.kind.prefers_async)
        if self.spec.is_causal:
            return config
        for values in (config, config.scheduler):
            check_not_given(values, sorted(OF_PARTS), _WHOLE)
        return _of_whole_texts(config, self.spec.max_model_len)

    @property
    def _never_drafts(self) -> str | None:
        if not self.generates:
            return "the model generates nothing; leave it out"
        reason = f"the model has recurrent layers; {SET_METHOD}"
        return reason if self.spec.state_size else super()._never_drafts

    def memory(self, config: EngineConfig) -> HostMemory | None:
        length = config.max_model_len or self.spec.max_model_len
        num_tokens = config.scheduler.max_num_batched_tokens
        own = self.kind.host_bytes(self.spec, self.weights, self.options, num_tokens=num_tokens, length=length)
        if own is None:
            return None
        found = host_memory(
            config,
            weights=own.weights,
            activations=own.activations,
            vocab_size=self.vocab_size if self.generates else 0,
            length=length,
            num_groups=len(self.spec.kv_groups()),
        )
        images = self.loaded.images
        if found is None or images is None:
            return found
        return found.beside("the encoder of images", sum(tensor.stored.nbytes for tensor in images.weights.values()))

    def weights_key(self, config: EngineConfig) -> str | None:
        spec = self.spec.for_length(config.max_model_len or self.spec.max_model_len)
        return self.kind.weights_key(spec, self.weights, self.options)

    def pool(self, config: EngineConfig, memory: HostMemory | None = None) -> PoolSize:
        return pool_size(
            self.spec,
            config,
            memory,
            bytes_per_value=self.kind.bytes_per_value(self.spec, self.weights, self.options),
            state_bytes=self.kind.state_bytes(self.spec),
            context_parallel_size=self.kind.num_context_ranks(self.options),
        )

    def media(self, limits: MediaLimits) -> Media:
        images = self.loaded.images
        if images is None:
            reason = self.loaded.no_images
            return Media(refused={"image": reason}, limits=limits) if reason else Media(limits=limits)
        if self.spec.extra_size and not self.kind.sees_later:
            what = "are added in later layers, too" if self.spec.num_features else "see later ones of their image"
            reason = f"its vectors {what}, which executor {self.kind.name!r} does not compute; use {_SEEING}"
            return Media(refused={"image": reason}, limits=limits)
        return Media(self.kind.images(images, self.options), limits=limits)

    def head(self) -> NextTokenHead:
        """Return the head for further tokens. Raise ConfigError without one, ModelError for a damaged one."""
        head = self.loaded.head()
        if head is None:
            raise ConfigError(f"speculation='head': {self.name} has no head for further tokens (MTP); use 'ngram'")
        return head

    def of_head(self, head: NextTokenHead) -> DecoderModel:
        """Return the layer of a head as a model of its own."""
        loaded = replace(self.loaded, spec=head.spec, weights=head.weights, pooling=PoolingSpec())
        return DecoderModel(loaded, *self.kind.for_drafts(self.options))

    def executor(self, size: PoolSize) -> Executor:
        spec = self.spec.for_length(size.max_model_len)
        return self.kind.decoder(spec, self.weights, size, self.pooling, self.options)


class EncoderModel(Model[LoadedModel]):
    """An encoder of Foreword's own loader. A step computes whole texts and keeps nothing of them."""

    generates = False

    def __init__(
        self, loaded: LoadedModel, spec: EncoderSpec, kind: ExecutorKind[Any], options: ExecutorOptions
    ) -> None:
        """Raise ConfigError for an option that only decoders have."""
        super().__init__(loaded, kind, options.of_encoder())
        self.spec, self.vocab_size = spec, spec.vocab_size
        if (family := loaded.encoder_family) is not None:
            self.read_lora = partial(read_encoder_lora, spec=spec, family=family, has_head=bool(loaded.pooling.head))

    def configured(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with one KV block per request, which has no memory.

        Raise ConfigError for a length or setting that it cannot have.
        """
        config = config.resolved(never_drafts="the model generates nothing; leave it out")
        check_of_encoder(config)
        check_of_encoder(config.scheduler)
        config = _of_whole_texts(config, self.spec.max_model_len)
        length = config.max_model_len or self.spec.max_model_len
        return replace(config, block_size=length, num_blocks=1 + config.scheduler.max_num_seqs)

    def pool(self, config: EngineConfig, memory: HostMemory | None = None) -> PoolSize:
        return pool_of(config.max_model_len or 0, (KVGroup(config.block_size),), 0, config)

    def executor(self, size: PoolSize) -> Executor:
        return self.kind.encoder(self.spec, self.weights, self.pooling, self.options)


_SEEING = " or ".join(repr(kind.name) for kind in KINDS.values() if kind.sees_later)


def _of_whole_texts(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """Return the settings for a model whose steps have whole texts. Raise ConfigError for a length that it cannot have,
    for speculation, for chunks and for a prefix cache.
    """
    length = request_length(max_model_len, max_model_len, config)
    if config.speculation is not None:
        raise ConfigError("speculation: the model generates nothing; leave it out")
    limits = config.scheduler
    for name, is_on in (("prefix_caching", config.prefix_caching), ("chunked_prefill", limits.chunked_prefill)):
        if is_on:
            raise ConfigError(f"{name}=True: {_WHOLE}; leave it out")
    tokens = max(limits.max_num_batched_tokens, length)
    limits = replace(limits, max_num_batched_tokens=tokens, chunked_prefill=False, long_prefill_threshold=0)
    return replace(config, scheduler=limits, max_model_len=length, prefix_caching=False)


def model_of(loaded: LoadedModel, kind: ExecutorKind[Any], options: ExecutorOptions) -> Model[LoadedModel]:
    """Return a model of Foreword's own loader. Raise ConfigError for options that it cannot have."""
    if isinstance(loaded.spec, EncoderSpec):
        return EncoderModel(loaded, loaded.spec, kind, options)
    return DecoderModel(loaded, kind, options)
