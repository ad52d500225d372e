"""The outputs of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from foreword.errors import ForewordError
from foreword.sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    text: without the stop string or stop token that ended it (unless requested). token_ids: every sampled token, the
    one that ended it included. finish_reason: "stop" (the model's end token, a stop token or a stop string), "length",
    "abort", "error", or None while it runs. stop_reason: the stop string or stop token id; None for the model's end
    token. logprobs: one mapping per token, if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock, None for events that have not happened.

    num_cached_tokens: prompt tokens found in the cache; cache_report: the same in words, with the position where the
    hit ends. num_preemptions: how often it was preempted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    cache_report: str = ""
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request: final if ``finished``, else so far. token_ids and text are always from the start.

    prompt_logprobs: one entry per prompt token, if requested; None for the first token. error: why a completion ended
    with finish_reason "error", such as logits that are not numbers; other requests are not concerned.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    error: ForewordError | None = None

    @property
    def failure(self) -> ForewordError | None:
        """The error, if every completion ended with one."""
        return self.error if all(output.finish_reason == "error" for output in self.outputs) else None
