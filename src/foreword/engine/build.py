"""Load a model by its name, and build an engine around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from foreword.batch import RequestStates
from foreword.cache import HostTier, TierFactory
from foreword.engine.answer_log import AnswerLog
from foreword.engine.config import AUTO, EngineConfig
from foreword.engine.defaults import suggested_params
from foreword.engine.engine import Engine
from foreword.engine.model import DecoderModel, Model, ProcessorFactory, model_of
from foreword.engine.observer import EngineObserver
from foreword.engine.speculation import Drafter, DraftModelDrafter, HeadDrafter, SpeculationConfig
from foreword.errors import ConfigError, ModelError, UnsupportedModelError
from foreword.executors import Executor
from foreword.executors.host import PagedExecutor
from foreword.executors.kinds import TRANSFORMERS, ExecutorChoice, installed_kind
from foreword.executors.options import VisionOptions
from foreword.executors.pool import PoolSize
from foreword.hashes import sha256
from foreword.installation import install
from foreword.models.loader import LoadedModel, find_model, load_model, with_mmproj
from foreword.native import available, native
from foreword.structured import GrammarCompiler

DISK_CACHE_BYTES = 16 << 30
"""Default of the total size of the files in cache_dir."""
DrafterFactory = Callable[[RequestStates], Drafter]
"""Makes a drafter over the rows of an engine."""


def load(
    model: str | Path | LoadedModel | Model[Any],
    executor: ExecutorChoice = "auto",
    options: Mapping[str, Any] | None = None,
) -> Model[Any]:
    """Load a model for a kind of executor. Errors are those of `load_model`, `installed_kind` and `read_options`.

    model: may also be a model that `load_model` returned. A model that this function returned is returned unchanged.
    executor: "auto" is transformers for a directory whose architecture Foreword does not have.
    options: of the executor.
    """
    if isinstance(model, Model):
        return model
    kind, given = installed_kind(executor), options or {}
    if kind is not TRANSFORMERS:
        own = None if executor == "auto" else kind.read_options(given)
        try:
            mmproj = VisionOptions.given_mmproj(given)
            if not isinstance(model, LoadedModel):
                model = load_model(model, mmproj=mmproj)
            elif mmproj is not None:
                model = with_mmproj(model, mmproj)
            return model_of(model, kind, own or kind.read_options(given))
        except UnsupportedModelError as error:
            if executor != "auto" or isinstance(model, LoadedModel) or find_model(model)[0].is_file():
                raise
            if not TRANSFORMERS.is_installed:
                raise ModelError(f"{error}. More run on transformers. {install(TRANSFORMERS.extra)}") from None
    if isinstance(model, LoadedModel):
        raise ConfigError(f"executor='transformers': loads models itself; give the path of {model.name} instead")
    chosen = TRANSFORMERS.read_options(given)
    from foreword.engine.transformers_model import transformers_model
    from foreword.executors.transformers.model import load_transformers

    folder, name = find_model(model)
    if folder.is_file():
        raise ModelError(f"{folder}: executor='transformers' reads directories. Leave the executor out for this file")
    return transformers_model(load_transformers(folder, name, **chosen.values()), chosen)


def build_engine(
    model: Model[Any],
    config: EngineConfig | None = None,
    *,
    executor: Executor | None = None,
    observers: Iterable[EngineObserver] = (),
    logits_processors: Sequence[ProcessorFactory] = (),
    drafter: DrafterFactory | None = None,
    tiers: Sequence[TierFactory] = (),
) -> Engine:
    """Return an engine that serves a loaded model. Raise ModelError if it suggests sampling parameters that are not
    valid.

    executor: an existing executor for the same max_model_len, with at least the blocks of the model's pool. Engines may
    use one executor in turns, if each resets its prefix cache before the turn of another.
    drafter: makes the drafter. It implies the method "custom".
    tiers: functions that make further places for blocks outside the pool. They are searched after those of the
    settings.
    """
    config = model.configured(with_drafter(config or EngineConfig(), drafter))
    suggested = suggested_params(model.suggested) if config.generation_config == "model" else {}
    if config.answer_log is not None:
        log = AnswerLog(Path(config.answer_log).expanduser(), config.answer_log_bytes, model.name)
        observers = [*observers, log]
    size = model.pool(config, model.memory(config) if executor is None else None)
    with ExitStack() as after_error:
        if executor is None:
            executor = model.executor(size)
            after_error.callback(executor.close)
        size.check(executor)
        engine = Engine(
            executor,
            vocab_size=model.vocab_size,
            max_model_len=size.max_model_len,
            kv_groups=size.kv_groups,
            num_blocks=size.num_blocks,
            num_states=size.num_states,
            config=config,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
            drafter=drafter or _draft_model(model, config, size) or _head(model, config, size, executor),
            grammars=GrammarCompiler(
                model.tokenizer,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                cache_bytes=config.grammar_cache_bytes,
            ),
            logits_processors=[*model.processors, *logits_processors],
            observers=observers,
            pooling=model.pooling,
            generates=model.generates,
            prefix_lm=model.prefix_lm,
            read_lora=model.read_lora,
            encoder=model.encoder,
            context_parallel=size.context_parallel,
            suggested=suggested,
            tiers=[*own_tiers(config), *tiers],
            model_key=_model_key(model, config, size, is_kept=bool(tiers)),
        )
        after_error.pop_all()
    if available():
        native.trim_memory()  # a tenth of a small model's memory was only used while it was read
    return engine


def own_tiers(config: EngineConfig) -> list[TierFactory]:
    """Return the functions that make the tiers of the settings, the fastest tier first."""
    made: list[TierFactory] = []
    if config.host_cache_bytes:
        made.append(partial(HostTier, capacity=config.host_cache_bytes))
    if config.cache_dir is not None:
        from foreword.cache.disk import DiskTier  # here: few engines save blocks

        directory, capacity = Path(config.cache_dir).expanduser(), config.cache_bytes or DISK_CACHE_BYTES
        made.append(partial(DiskTier, directory, capacity=capacity))
    return made


def _model_key(model: Model[Any], config: EngineConfig, size: PoolSize, *, is_kept: bool) -> bytes:
    """Return the data, besides the executor, on which the blocks of a model depend; nothing if no block outlives the
    process.

    is_kept: whether further tiers may keep blocks longer. A model without files has no key for them.
    """
    if config.cache_dir is None and not (is_kept and model.path.exists()):
        return b""
    from foreword.models.digests import model_key  # here: few engines save blocks

    spec = repr(model.spec.for_length(size.max_model_len)) if isinstance(model, DecoderModel) else ""
    return model_key(model.path) + sha256(spec.encode()).digest()


def with_drafter(config: EngineConfig, drafter: DrafterFactory | None) -> EngineConfig:
    """Return the settings of an engine with or without a drafter, which means the method "custom".

    Raise ConfigError for a drafter with another method, and for that method without one.
    """
    method = "auto" if config.speculation is None else config.speculation.method
    if drafter is not None and method == "auto":
        return replace(config, speculation=replace(config.speculation or AUTO, method="custom"))
    if drafter is not None and method != "custom":
        raise ConfigError(f"speculation={method!r}: a drafter is given too; give 'custom', or leave the drafter out")
    if drafter is None and method == "custom":
        raise ConfigError("speculation='custom': there is no drafter; give drafter too")
    return config


def _draft_model(model: Model[Any], config: EngineConfig, size: PoolSize) -> DrafterFactory | None:
    """Return the function that makes the draft model's drafter; None without a draft model. Errors are those of
    `load_model`.

    size: the size of the model's own pool; the draft model has a second pool.
    """
    if config.speculation is None or config.speculation.model is None:
        return None
    kind, options = model.kind.for_drafts(model.options)
    draft = DecoderModel(load_model(config.speculation.model), kind, options)
    relative_cost = draft.weight_bytes / model.weight_bytes
    return partial(draft_model_drafter, draft, config=config, relative_cost=relative_cost, pool_bytes=size.num_bytes)


def _head(model: Model[Any], config: EngineConfig, size: PoolSize, target: Executor) -> DrafterFactory | None:
    """Return the function that makes the drafter of the model's own head; None with another method. Raise ConfigError
    without a head.

    size: the size of the model's own pool; the head has a second pool. target: the executor that runs the model.
    """
    if config.speculation is None or config.speculation.method != "head":
        return None
    if not isinstance(model, DecoderModel):
        raise ConfigError(
            f"speculation='head': executor {model.kind.name!r} runs no head for further tokens (MTP); use 'ngram', or "
            "another executor"
        )
    head = model.head()
    own = model.of_head(head)
    settings = replace(config, max_model_len=size.max_model_len, num_blocks=None, speculation=None)
    memory = own.memory(settings)
    pool = own.pool(settings, None if memory is None else memory.beside("the KV pool of the model", size.num_bytes))
    read = sum(t.stored.nbytes for n, t in head.weights.items() if n != "embed" or head.spec.tie_embeddings)
    read += 4 * prod(head.projection.shape)  # in float32
    return partial(
        HeadDrafter,
        model=_with_hidden_states(target),
        head=head,
        executor=_with_hidden_states(own.executor(pool)),
        kv_groups=pool.kv_groups,
        num_blocks=pool.num_blocks,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        relative_cost=read / model.weight_bytes,
    )


def _with_hidden_states(executor: Executor) -> PagedExecutor:
    """Return the executor itself. Raise ConfigError if it does not provide hidden states."""
    if not isinstance(executor, PagedExecutor):
        raise ConfigError(f"speculation='head': {type(executor).__name__} has no hidden states; use 'ngram'")
    return executor


def draft_model_drafter(
    draft: DecoderModel, target: RequestStates, *, config: EngineConfig, relative_cost: float, pool_bytes: int = 0
) -> DraftModelDrafter:
    """Return a drafter that runs ``draft``. Raise ConfigError unless it has the target's vocabulary and length.

    pool_bytes: the size of the target's KV pool.
    """
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model {draft.name!r} has {draft.vocab_size} token ids, the target {target.vocab_size}: "
            "use one with the target's tokenizer"
        )
    if (longest := draft.spec.longest_model_len) < target.max_model_len:
        raise ConfigError(f"draft model {draft.name!r} was made for {longest} tokens: lower max_model_len to that")
    has_states = any(group.recurrent for group in draft.spec.kv_groups())
    kept = SpeculationConfig(num_tokens=1) if has_states else None  # space for a second state of each request
    own = replace(config, max_model_len=target.max_model_len, num_blocks=None, speculation=kept)
    memory = draft.memory(own)
    # A drafter has no prefix cache, and so no snapshots.
    own = replace(own, prefix_caching=False, host_cache_bytes=0, cache_dir=None, cache_bytes=None)
    size = draft.pool(own, None if memory is None else memory.beside("the KV pool of the target", pool_bytes))
    return DraftModelDrafter(
        target,
        draft.executor(size),
        kv_groups=size.kv_groups,
        num_blocks=size.num_blocks,
        num_states=size.num_states,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        relative_cost=relative_cost,
    )
