"""Counters of an engine, as an observer."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.batch import InputBatch
from foreword.engine.observer import EngineObserver
from foreword.engine.outputs import RequestOutput
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan


@dataclass(slots=True, eq=False)
class EngineMetrics(EngineObserver):
    """Counts since it was added.

    num_steps, num_tokens: committed steps, and the tokens that they computed, drafts included.
    num_sampled_tokens: output tokens of ended requests. num_preemptions: preemptions by committed steps.
    num_requests_added, num_requests_ended: requests, however many completions each has.
    num_prompt_tokens, num_cached_tokens: prompt tokens of ended requests, and how many of them the cache had.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_requests_added: int = 0
    num_requests_ended: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """num_cached_tokens / num_prompt_tokens, 0 before the first request ends."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        self.num_requests_added += 1

    def request_ended(self, output: RequestOutput) -> None:
        self.num_requests_ended += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.metrics.num_cached_tokens
        self.num_sampled_tokens += sum(completion.num_tokens for completion in output.outputs)

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_preemptions += len(plan.preempted)
