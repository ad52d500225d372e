"""From a loaded model to an engine: the size of the KV pool, the executor and the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from foreword.batch import ContextParallel, KVGroup, RequestStates
from foreword.cache import cache_group
from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineObserver
from foreword.engine.speculation import Drafter, DraftModelDrafter
from foreword.errors import ConfigError, ModelError, UnsupportedModelError
from foreword.executors import Executor
from foreword.executors.encoder import EncoderExecutor
from foreword.executors.groups import batch_groups
from foreword.executors.native import NativeExecutor
from foreword.executors.native_encoder import NativeEncoderExecutor
from foreword.executors.numpy import NumpyExecutor
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.loader import LoadedModel, find_model, load_model
from foreword.models.lora import read_lora, read_lora_by_names
from foreword.models.spec import DecoderSpec
from foreword.native import available
from foreword.sampling import LogitsProcessor
from foreword.structured import GrammarCompiler

if TYPE_CHECKING:
    from foreword.executors.transformers.model import TransformersModel

ExecutorKind = Literal["auto", "native", "numpy", "torch", "transformers", "device"]

PARALLEL = ("tensor_parallel_size", "context_parallel_size")
"""Those that divide a model among processes."""

OPTIONS = {
    "native": ("num_threads", "weight_format", "kv_format", "numa_nodes", "preallocate_kv"),
    "numpy": (),
    "torch": ("num_threads", "device", "dtype", "weight_format", "compile", *PARALLEL),
    "transformers": ("num_threads", "device", "dtype", "compile", "media_cache_bytes"),
    "device": ("device", "dtype", "weight_format", "kv_format"),
}
"""The options of each executor."""

KV_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}  # of one value of the native executor, scales included


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of a model. block_bytes: keys and values of one block in all its storage slots, on all ranks.

    max_num_seqs: requests that are computed at a time. context_parallel: the ranks that the groups are spread over.
    """

    max_model_len: int
    kv_groups: tuple[KVGroup, ...]
    block_bytes: int
    num_blocks: int
    max_num_seqs: int
    context_parallel: ContextParallel | None = None


def encoder_config(spec: EncoderSpec, config: EngineConfig) -> EngineConfig:
    """The settings of an engine that computes whole texts in one step each and keeps nothing of them: one KV block of
    a request, which has no memory. ConfigError for a length that the model does not have, and for speculation.
    """
    length = config.max_model_len or spec.max_model_len
    if length > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={length}: the model was made for {spec.max_model_len} tokens; use at most that"
        )
    if config.speculation is not None:
        raise ConfigError("speculation: the model is an encoder and generates nothing; leave it out")
    limits = config.scheduler
    tokens = max(limits.max_num_batched_tokens, length)
    return replace(
        config,
        scheduler=replace(limits, max_num_batched_tokens=tokens, chunked_prefill=False, long_prefill_threshold=0),
        max_model_len=length,
        block_size=length,
        num_blocks=1 + limits.max_num_seqs,
        prefix_caching=False,
    )


def build_encoder(
    model: LoadedModel, spec: EncoderSpec, kind: ExecutorKind = "auto", **options: Any
) -> EncoderExecutor:
    """See `build_executor`. ConfigError for an option that only decoders have."""
    for name in ("kv_format", "preallocate_kv"):
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: an encoder has no KV cache; leave it out")
    if "numa_nodes" in options:
        raise ConfigError(f"numa_nodes={options['numa_nodes']}: an encoder's threads are not divided; leave it out")
    kind = executor_kind(kind, options)
    if kind == "device":
        raise ConfigError("executor='device': runs decoders only; use executor='torch' with device='cuda'")
    for name in PARALLEL:
        if (size := options.pop(name, 1)) != 1:
            raise ConfigError(f"{name}={size}: an encoder runs in one process; leave it out")
    if options.pop("compile", False):
        raise ConfigError("compile=True: encoders are not compiled; leave it out")
    match kind:
        case "native":
            return NativeEncoderExecutor(spec, model.weights, model.pooling, **options)
        case "torch":
            from foreword.executors.torch.encoder import TorchEncoderExecutor

            return TorchEncoderExecutor(spec, model.weights, model.pooling, **options)
    return EncoderExecutor(spec, model.weights, model.pooling)


def pool_size(
    spec: DecoderSpec, config: EngineConfig, *, bytes_per_value: float = 4, context_parallel_size: int = 1
) -> PoolSize:
    """Blocks for max_num_seqs requests of max_model_len, within kv_cache_bytes; ConfigError if no request fits.

    max_model_len: the spec's own unless configured. A longrope model can be configured for more; then all requests use
    the frequencies for long contexts (`DecoderSpec.for_length`).
    block_bytes = 2 · storage slots · block_size · num_kv_heads · head_dim · bytes_per_value · context_parallel_size
    context_parallel_size: a block has block_size tokens on each of so many ranks.

    A block of a model with recurrent layers holds their states, too: block_size is then the least multiple of the
    configured one with as many bytes of keys and values as a state has, or that holds a whole request.
    """
    if context_parallel_size < 1:
        raise ConfigError(f"context_parallel_size={context_parallel_size}: must be at least 1")
    length = _request_length(spec.max_model_len, spec.longest_model_len, config)
    token_bytes = round(2 * spec.num_kv_heads * spec.head_dim * bytes_per_value)
    state_bytes = 4 * spec.state_size
    multiple = min(-(-state_bytes // (config.block_size * token_bytes)), -(-length // config.block_size))
    block_size = config.block_size * max(multiple, 1)
    cp = ContextParallel(context_parallel_size, 0) if context_parallel_size > 1 else None
    groups = batch_groups(spec, block_size, context_parallel=cp is not None)
    block_bytes = context_parallel_size * spec.num_slots * max(block_size * token_bytes, state_bytes)
    return _pool_of(length, groups, block_bytes, config, cp)


def transformers_pool(model: TransformersModel, config: EngineConfig) -> PoolSize:
    """The same for a model of transformers, whose layers may differ in their keys and values."""
    from foreword.executors.torch.cache import slot_sizes

    length = _request_length(model.max_model_len, model.max_model_len, config)
    dtype = model.module.dtype
    block_bytes = sum(slot_sizes(model.trace.layers, config.block_size, dtype)) * dtype.itemsize
    return _pool_of(length, batch_groups(model.trace, config.block_size), block_bytes, config)


def encoder_decoder_config(model: TransformersModel, config: EngineConfig) -> EngineConfig:
    """The settings of an engine for a model of transformers: those of an encoder–decoder have as many requests at a
    time as cross-attention has places for in half of kv_cache_bytes. ConfigError if that is none.
    """
    if model.encoder is None:
        return config
    from foreword.executors.transformers.decoder_trace import DecoderTrace
    from foreword.executors.transformers.encoder_decoder import cross_bytes

    assert isinstance(model.trace, DecoderTrace)
    one = cross_bytes(model.trace, model.encoder.max_len, model.module.dtype)
    count = min(config.scheduler.max_num_seqs, config.kv_cache_bytes // 2 // one)
    if count < 1:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes}: the encoder's keys and values of a request need {one}, at most "
            f"half of it; give at least {2 * one}"
        )
    limits = replace(config.scheduler, max_num_seqs=count)
    return replace(config, scheduler=limits, kv_cache_bytes=config.kv_cache_bytes - count * one)


def _request_length(usual: int, longest: int, config: EngineConfig) -> int:
    """The configured max_model_len, or the usual one. ConfigError if it is above the longest."""
    length = config.max_model_len or usual
    if length > longest:
        raise ConfigError(f"max_model_len={length}: the model was made for {longest} tokens; use at most that")
    return length


def _pool_of(
    length: int,
    groups: tuple[KVGroup, ...],
    block_bytes: int,
    config: EngineConfig,
    context_parallel: ContextParallel | None = None,
) -> PoolSize:
    chunk = min(length, config.scheduler.max_num_batched_tokens + config.most_draft_tokens(groups))
    one = sum(cache_group(g, context_parallel).most_blocks(length, chunk) for g in groups)
    most = config.scheduler.max_num_seqs
    if config.num_blocks is not None:
        return PoolSize(length, groups, block_bytes, config.num_blocks, most, context_parallel)
    num_blocks = min(1 + one * most, config.kv_cache_bytes // block_bytes)
    if num_blocks < 1 + one:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes}: one request of max_model_len={length} tokens needs "
            f"{(1 + one) * block_bytes}; give that many, or lower max_model_len"
        )
    return PoolSize(length, groups, block_bytes, num_blocks, most, context_parallel)


def load(model: str, kind: ExecutorKind = "auto", **options: Any) -> LoadedModel | TransformersModel:
    """The model, as the executor of this kind reads it. Errors as `load_model` and `executor_kind`.

    kind: "auto" is transformers for a directory whose architecture Foreword does not have.
    """
    if kind != "transformers":
        try:
            return load_model(model)
        except UnsupportedModelError as error:
            if kind != "auto" or find_model(model)[0].is_file():
                raise
            if not _has_transformers():
                raise ModelError(f"{error}. More run on transformers: `pip install foreword[transformers]`") from None
    executor_kind("transformers", options)
    from foreword.executors.transformers.model import load_transformers

    folder, name = find_model(model)
    if folder.is_file():
        raise ModelError(f"{folder}: executor='transformers' reads directories. Leave the executor out for this file")
    return load_transformers(folder, name, **options)


def _has_transformers() -> bool:
    return find_spec("torch") is not None and find_spec("transformers") is not None


def build_executor(model: LoadedModel, size: PoolSize, kind: ExecutorKind = "auto", **options: Any) -> Executor:
    """The executor of this kind for a decoder. Errors as `executor_kind`."""
    kind = executor_kind(kind, options)
    spec = model.decoder.for_length(size.max_model_len)
    blocks: dict[str, Any] = {"num_blocks": size.num_blocks, "block_size": size.kv_groups[0].block_size}
    common: dict[str, Any] = {**blocks, "pooling": model.pooling}
    match kind:
        case "device":
            from foreword.executors.torch.on_rows import device_executor

            return device_executor(spec, model.weights, **blocks, max_num_seqs=size.max_num_seqs, **options)
        case "native":
            return NativeExecutor(spec, model.weights, **common, **options)
        case "torch":
            from foreword.executors.torch.executor import TorchExecutor
            from foreword.executors.torch.parallel import ParallelExecutor

            sizes = {name: options.pop(name, 1) for name in PARALLEL}
            if any(size != 1 for size in sizes.values()):
                return ParallelExecutor(spec, model.weights, **sizes, **common, **options)
            return TorchExecutor(spec, model.weights, **common, **options)
    return NumpyExecutor(spec, model.weights, **common)


def build_transformers_executor(model: TransformersModel, size: PoolSize) -> Executor:
    """The executor of a model of transformers."""
    if model.encoder is not None:
        from foreword.executors.transformers.decoder_trace import DecoderTrace
        from foreword.executors.transformers.encoder_decoder import EncoderDecoderExecutor

        assert isinstance(model.trace, DecoderTrace)
        return EncoderDecoderExecutor(
            model.module,
            model.trace,
            num_blocks=size.num_blocks,
            block_size=size.kv_groups[0].block_size,
            max_encoder_len=model.encoder.max_len,
            max_num_seqs=size.max_num_seqs,
        )
    from foreword.executors.transformers.executor import TransformersExecutor

    return TransformersExecutor(
        model.module,
        model.trace,
        num_blocks=size.num_blocks,
        block_size=size.kv_groups[0].block_size,
        **model.inputs._asdict(),
        compile=model.compile,
        pooling=model.pooling,
    )


def executor_kind(kind: ExecutorKind, options: Mapping[str, Any]) -> ExecutorKind:
    """``kind``, and for "auto" the native executor if it is built, else the NumPy one.

    ConfigError for a kind that does not exist or is not installed, and for an option that it does not have.
    """
    if kind == "auto":
        kind = "native" if available() else "numpy"
    if kind not in OPTIONS:
        raise ConfigError(f"executor={kind!r}: must be one of 'auto', {', '.join(map(repr, OPTIONS))}")
    if kind == "native" and not available():
        raise ConfigError("executor='native': the native module is not built; install with a C++20 compiler")
    if kind == "torch" and find_spec("torch") is None:
        raise ConfigError("executor='torch': PyTorch is not installed; install foreword[torch]")
    if kind == "device" and (find_spec("torch") is None or find_spec("triton") is None):
        raise ConfigError("executor='device': PyTorch and Triton are not installed; install foreword[torch] on Linux")
    if kind == "transformers" and not _has_transformers():
        raise ConfigError("executor='transformers': transformers is not installed; install foreword[transformers]")
    for name, value in options.items():
        if name not in OPTIONS[kind]:
            own = ", ".join(other for other, names in OPTIONS.items() if name in names)
            raise ConfigError(f"{name}={value!r:.80}: executor {kind!r} has no such option ({own} has); leave it out")
    return kind


def kv_bytes(model: LoadedModel, kind: ExecutorKind, options: Mapping[str, Any]) -> float:
    """Bytes of one number of a key or value in the cache of an executor, scales included."""
    match executor_kind(kind, options):
        case "native":
            return KV_BYTES.get(options.get("kv_format", "bf16"), 4)
        case "device" if options.get("kv_format") == "fp8":
            return 1 + 4 / model.decoder.head_dim
        case "torch" | "device":
            from foreword.executors.torch.options import dtype_of

            return int(dtype_of(options.get("dtype", "auto"), model.weights).itemsize)
    return 4


def build_engine(
    model: LoadedModel | TransformersModel,
    config: EngineConfig | None = None,
    *,
    executor: ExecutorKind = "auto",
    runs_on: Executor | None = None,
    observers: Iterable[EngineObserver] = (),
    **options: Any,
) -> Engine:
    """An engine that serves a loaded model. observers: from its start.

    options: of the executor, see `OPTIONS`.
    runs_on: an existing executor, with at least the blocks of `pool_size`, of the spec for its max_model_len. Engines
    may share one in turns, if each resets its prefix cache before the other's turn.
    """
    config = config or EngineConfig()
    if not isinstance(model, LoadedModel):
        config = encoder_decoder_config(model, config)
        size = transformers_pool(model, config)
        return _decoder_engine(
            model,
            runs_on or build_transformers_executor(model, size),
            size,
            config,
            vocab_size=model.trace.vocab_size,
            drafter=_drafter(config, model.weight_bytes, "auto", {}),
            encoder=model.encoder,
            logits_processors=_model_rules(model),
            observers=observers,
            generates=model.generates,
            read_lora=partial(read_lora_by_names, layers=model.trace.linear),
        )
    if isinstance(model.spec, EncoderSpec):
        config = encoder_config(model.spec, config)
        length = config.max_model_len or model.spec.max_model_len
        return Engine(
            runs_on or build_encoder(model, model.spec, executor, **options),
            vocab_size=model.spec.vocab_size,
            max_model_len=length,
            kv_groups=[KVGroup(config.block_size)],
            num_blocks=config.num_blocks or 0,
            config=config,
            tokenizer=model.tokenizer,
            observers=observers,
            pooling=model.pooling,
            generates=False,
        )
    if executor == "device" and config.async_scheduling is None:
        config = replace(config, async_scheduling=True)
    size = pool_size(
        model.decoder,
        config,
        bytes_per_value=kv_bytes(model, executor, options),
        context_parallel_size=options.get("context_parallel_size", 1),
    )
    with ExitStack() as after_error:
        if runs_on is None:
            runs_on = build_executor(model, size, executor, **options)
            after_error.callback(runs_on.close)
        engine = _decoder_engine(
            model,
            runs_on,
            size,
            config,
            vocab_size=model.spec.vocab_size,
            drafter=_drafter(config, weight_bytes(model), executor, options),
            observers=observers,
            generates=model.decoder.has_logits,
            read_lora=partial(read_lora, spec=model.decoder, family=model.family) if model.family else None,
            context_parallel=size.context_parallel,
        )
        after_error.pop_all()
    return engine


def _model_rules(model: TransformersModel) -> list[Callable[[RequestStates], LogitsProcessor]]:
    """The processor of the rules of an encoder–decoder, if it has some."""
    encoder = model.encoder
    if encoder is None or not (encoder.rules or encoder.speech is not None):
        return []
    from foreword.sampling.generation_rules import GenerationProcessor

    return [partial(GenerationProcessor, rules=encoder.rules)]


def _decoder_engine(
    model: LoadedModel | TransformersModel,
    executor: Executor,
    size: PoolSize,
    config: EngineConfig,
    *,
    vocab_size: int,
    **settings: Any,
) -> Engine:
    return Engine(
        executor,
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        kv_groups=size.kv_groups,
        num_blocks=size.num_blocks,
        config=config,
        tokenizer=model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        pooling=model.pooling,
        grammars=GrammarCompiler(model.tokenizer, vocab_size=vocab_size, eos_token_ids=model.eos_token_ids),
        **settings,
    )


def _drafter(
    config: EngineConfig, target_bytes: int, kind: ExecutorKind, options: Mapping[str, Any]
) -> Callable[[RequestStates], Drafter] | None:
    """What makes the drafter of an engine whose model has so many bytes of weights; None without a draft model."""
    if config.speculation is None or config.speculation.model is None:
        return None
    draft = load_model(config.speculation.model)
    relative_cost = weight_bytes(draft) / target_bytes
    kind = "torch" if kind == "device" else kind  # a mirror's tokens are replaced in place, which rows do not follow
    known = OPTIONS.get(kind, tuple(options))
    own = {name: value for name, value in options.items() if name in known and name not in PARALLEL}
    return partial(build_drafter, draft, config=config, relative_cost=relative_cost, kind=kind, **own)


def build_drafter(
    draft: LoadedModel,
    target: RequestStates,
    *,
    config: EngineConfig,
    relative_cost: float,
    kind: ExecutorKind,
    **options: Any,
) -> DraftModelDrafter:
    """A drafter that runs ``draft``. ConfigError unless it has the target's vocabulary and length."""
    if draft.decoder.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model {draft.name!r} has {draft.decoder.vocab_size} token ids, the target {target.vocab_size}: "
            "use one with the target's tokenizer"
        )
    if (longest := draft.decoder.longest_model_len) < target.max_model_len:
        raise ConfigError(f"draft model {draft.name!r} was made for {longest} tokens: lower max_model_len to that")
    own = replace(config, max_model_len=target.max_model_len, num_blocks=None, speculation=None)
    size = pool_size(draft.decoder, own, bytes_per_value=kv_bytes(draft, kind, options))
    return DraftModelDrafter(
        target,
        build_executor(draft, size, kind, **options),
        kv_groups=size.kv_groups,
        num_blocks=size.num_blocks,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        relative_cost=relative_cost,
    )


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of all weights, which a step of a small batch takes time in proportion to."""
    return sum(tensor.stored.nbytes for tensor in model.weights.values())
