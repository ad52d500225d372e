"""The engine's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from foreword.batch.values.kv_groups import KVGroup
from foreword.batch.values.plan import Check
from foreword.batch.values.sampling_params import SamplingParams
from foreword.engine.speculation.config import SpeculationConfig
from foreword.errors import ConfigError, nearest
from foreword.scheduler import SchedulerConfig

CHECKS = get_args(Check)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    scheduler: token budget, number of running requests and policy; see `SchedulerConfig`.
    max_model_len: tokens of a request, prompt included (None: the model's own length; of a longrope model its original
        length, since beyond that all its requests have other rotary frequencies).
    block_size: tokens of a KV block; a model with recurrent layers may use a multiple of it (`pool_size`).
    num_blocks: blocks of the pool, the null block included (None: as many as max_num_seqs requests of max_model_len
        could need, within kv_cache_bytes).
    kv_cache_bytes: memory for keys and values when num_blocks is None.
    lora_bytes: memory for LoRA adapters. When it is full, the least recently used leave it, and are read again from
        their files when a request needs them; those of requests in progress stay, also beyond it.
    prefix_caching: reuse the blocks of equal prompt prefixes. partial_reuse: also a part of a block, by copying it.
    async_scheduling: plan and prepare the next step while one runs. The outputs are the same. None: where the executor
        is "device".
    speculation: draft tokens and verify them; see `SpeculationConfig` (None: one token per step).
    max_forced_tokens: tokens of a request that a grammar leaves no choice of, and that one step takes (0: none; a model
        with recurrent layers never takes any).
    seed: the seeds of requests without one are derived from it (None: a different one each run).
    check: how each step is checked before it runs, see `prepare_inputs`: "off", "bounds", or "full", which proves every
        read and write of the cache and is slow.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 2 << 30
    lora_bytes: int = 1 << 30
    prefix_caching: bool = True
    partial_reuse: bool = True
    async_scheduling: bool | None = None
    speculation: SpeculationConfig | None = None
    max_forced_tokens: int = 8
    seed: int | None = 0
    check: Check = "off"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}: must be at least 1; 16 is usual")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len}: must hold a prompt token and an output token")
        if self.kv_cache_bytes < 1:
            raise ConfigError(f"kv_cache_bytes={self.kv_cache_bytes}: must be positive")
        if self.lora_bytes < 0:
            raise ConfigError(f"lora_bytes={self.lora_bytes}: must be 0 or more")
        if self.max_forced_tokens < 0:
            raise ConfigError(f"max_forced_tokens={self.max_forced_tokens}: must be 0 or more")
        if self.check not in CHECKS:
            raise ConfigError(f"check={self.check!r}: must be one of {', '.join(map(repr, CHECKS))}")

    def most_forced_tokens(self, kv_groups: Sequence[KVGroup]) -> int:
        """max_forced_tokens, 0 with recurrent layers: their state cannot be taken back from a draft."""
        return 0 if any(group.recurrent for group in kv_groups) else self.max_forced_tokens

    def most_draft_tokens(self, kv_groups: Sequence[KVGroup]) -> int:
        """Draft tokens of a request in one step, at most; forced ones are verified as drafts."""
        return max(self.most_forced_tokens(kv_groups), self.speculation.num_tokens if self.speculation else 0)


def engine_config(options: Mapping[str, Any], *, other_names: Iterable[str] = ()) -> EngineConfig:
    """An `EngineConfig` from flat options: the fields of `EngineConfig` and those of its `SchedulerConfig`.

    ConfigError for any other name, with the closest known one; other_names: options that the caller takes itself.
    """
    scheduler = {f.name for f in fields(SchedulerConfig)}
    engine = {f.name for f in fields(EngineConfig)}
    for name in options:
        if name not in scheduler | engine:
            sampling = {f.name for f in fields(SamplingParams)}
            close = nearest(name, scheduler | engine | sampling | set(other_names))
            hint = " It is a parameter of a request: pass SamplingParams." if close in sampling else ""
            raise ConfigError(f"{name}={options[name]!r}: unknown option; did you mean {close!r}?{hint}")
    config = EngineConfig(**{name: value for name, value in options.items() if name in engine})
    flat = {name: value for name, value in options.items() if name in scheduler}
    return replace(config, scheduler=replace(config.scheduler, **flat))
