"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import ConfigError
from foreword.scheduler.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """
    max_num_batched_tokens: the token budget of a step.
    max_num_seqs: requests that run at the same time.
    policy: "fcfs", "priority" or "shortest-first".
    chunked_prefill: whether a prompt may be spread over steps. Without, a prompt that does not fit in the rest of
        the budget waits, with all requests behind it, and no recurrent state is kept at the end of a prompt.
    long_prefill_threshold: most prompt tokens of one request in a step that also serves others (0: no limit).
    reserve_full_prompt: admit a request only if the blocks of its whole prompt are free, apart from those that running
        prompts still need.
    watermark: the share of all blocks that an admission leaves free while other requests run.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: str = "fcfs"
    chunked_prefill: bool = True
    long_prefill_threshold: int = 0
    reserve_full_prompt: bool = True
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: must be one of {', '.join(map(repr, POLICIES))}")
        if self.long_prefill_threshold < 0:
            raise ConfigError(f"long_prefill_threshold={self.long_prefill_threshold}: must be 0 (no limit) or more")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark}: must be in [0, 1)")
