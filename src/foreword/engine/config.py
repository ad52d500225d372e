"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.batch.proof.checker import Check
from foreword.engine.speculation.config import SpeculationConfig
from foreword.errors import ConfigError
from foreword.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    max_model_len: tokens of a request, prompt included (None: what the model was made for; of a longrope model its
        original length, since beyond that all its requests have other rotary frequencies).
    max_num_seqs, max_num_batched_tokens, policy, chunked_prefill, long_prefill_threshold, reserve_full_prompt,
        watermark: see `SchedulerConfig`.
    block_size: tokens of a KV block. num_blocks: blocks of the pool, the null block among them (None: as many as
        max_num_seqs requests of max_model_len could need, within kv_cache_bytes).
    kv_cache_bytes: memory for keys and values when num_blocks is None.
    prefix_caching: reuse the blocks of equal prompt beginnings. partial_reuse: part of a block too, by copying it.
    async_scheduling: plan and prepare the next step while one runs. Same outputs.
    speculation: guess tokens and verify them; see `SpeculationConfig` (None: one token a step).
    seed: from which requests without a seed get theirs (None: a different one each run).
    check: what each step is held against before it runs, see `prepare_inputs`: "off", "cheap", or "full", which proves
        every read and write of the cache and is slow.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    chunked_prefill: bool = True
    long_prefill_threshold: int = 0
    reserve_full_prompt: bool = True
    watermark: float = 0.01
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 2 << 30
    prefix_caching: bool = True
    partial_reuse: bool = True
    async_scheduling: bool = False
    speculation: SpeculationConfig | None = None
    seed: int | None = 0
    check: Check = "off"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}: must be at least 1; 16 is usual")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len}: must hold a prompt token and an output token")
        if self.kv_cache_bytes < 1:
            raise ConfigError(f"kv_cache_bytes={self.kv_cache_bytes}: must be positive")
        if self.check not in ("off", "cheap", "full"):
            raise ConfigError(f"check={self.check!r}: must be 'off', 'cheap' or 'full'")
        self.scheduler_config()

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=self.policy,
            chunked_prefill=self.chunked_prefill,
            long_prefill_threshold=self.long_prefill_threshold,
            reserve_full_prompt=self.reserve_full_prompt,
            watermark=self.watermark,
        )
