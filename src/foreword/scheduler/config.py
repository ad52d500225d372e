"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.scheduler.policies import POLICIES, Key, Policy, policy_of
from foreword.settings import check_settings, setting


def _known(given: str | Policy | Key) -> str | Policy | Key:
    policy_of(given)
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler. Raise ConfigError for a value of another type or out of range."""

    max_num_batched_tokens: int = setting(2048, "Largest number of tokens that one step computes.", least=1, most=2**20)
    max_num_seqs: int = setting(256, "Largest number of requests that run at the same time.", least=1, most=2**16)
    # fmt: off
    policy: str | Policy | Key = setting(
        "fcfs", f"Order of admission and preemption: {', '.join(POLICIES)}, the name of a plug-in, or module:function.",
        value_name="NAME", convert=_known,
    )
    chunked_prefill: bool | None = setting(
        None, "Spread a prompt over several steps. Without it a prompt that does not fit in the rest of a step waits, "
        "with all requests behind it, and no recurrent state is kept at the end of a prompt. None: yes, unless the "
        "model computes whole texts.",
    )
    long_prefill_threshold: int = setting(
        0, "Largest number of prompt tokens of one request in a step that also serves others; 0: no limit.",
        most=2**20, decoders_only=True,
    )
    prompt_time_share: float = setting(
        0.5, "Largest share of the time of a step for prompts while other requests stream their answers. A prompt then "
        "takes more steps; without chunked_prefill, it is never divided. 1: no limit.",
        least=0.01, most=1, decoders_only=True,
    )
    reserve_full_prompt: bool = setting(
        True,
        "Admit a request only if the blocks of its whole prompt are free, apart from those that running prompts need.",
    )
    watermark: float = setting(
        0.01, "Share of all KV blocks that an admission leaves free while other requests run.", most=0.99,
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def chunks_prompts(self) -> bool:
        """Return whether prompts are spread over several steps."""
        return self.chunked_prefill is not False

    @property
    def bounded_share(self) -> float:
        """Return prompt_time_share, or 1 if prompts are not divided."""
        return self.prompt_time_share if self.chunks_prompts else 1.0

    @property
    def order(self) -> Policy:
        """The policy as an object."""
        return policy_of(self.policy)
