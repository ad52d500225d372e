"""What the engine remembers of a request beyond its tokens: who asked, what was said so far, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.batch.values.sampling_params import SamplingParams
from foreword.engine.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from foreword.engine.text import TextStream
from foreword.sampling import TokenLogprobs
from foreword.scheduler import Request


@dataclass(slots=True, eq=False)
class Completion:
    """One of a job's n completions: a scheduler's request, and its text and log-probabilities.

    token_ids is filled at the end; until then the tokens live in the request's row. num_read: output tokens that went
    into the text; only a completion that streams, may meet a stop string or wants log-probabilities is read on the way.
    """

    job: Job
    index: int
    request: Request
    end_ids: frozenset[int]
    text: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    num_read: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def reads_every_token(self) -> bool:
        return self.job.stream or bool(self.params.stop_strings) or self.params.logprobs is not None

    def output(self, token_ids: list[int]) -> CompletionOutput:
        wants_logprobs = self.job.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text if self.text is not None else "",
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if self.logprobs else None,
        )

    def finish(self, token_ids: list[int], why: FinishReason, stop_reason: int | str | None) -> None:
        """End with these tokens; the text gets what it has not seen, without the token that ended it."""
        self.token_ids, self.finish_reason, self.stop_reason = token_ids, why, stop_reason
        if self.text is not None and self.text.stop is None:
            ended_by_token = why == "stop" and not self.params.include_stop_str_in_output
            self.text.push(token_ids[self.num_read : len(token_ids) - ended_by_token], may_stop=False)
            self.text.finish()
        self.job.num_unfinished -= 1

    @property
    def cumulative_logprob(self) -> float:
        """Σ log-probability of the sampled tokens; each entry begins with the one that was sampled."""
        return sum(next(iter(entry.values())).logprob for entry in self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """The same a token, so that long and short outputs compare; without a token the least of all."""
        return self.cumulative_logprob / len(self.logprobs) if self.logprobs else -math.inf


@dataclass(slots=True, eq=False)
class Job:
    """One request of a user: a prompt and its n (or best_of) completions. stream: reported while it goes on."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    arrival_time: float
    completions: list[Completion] = field(default_factory=list)
    followers: list[Completion] = field(default_factory=list)  # wait until the first has computed the prompt
    num_unfinished: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def add_prompt_logprobs(self, found: Sequence[tuple[int, TokenLogprobs]]) -> None:
        """Take what a step found; what a preempted request computes again is known already."""
        for position, entry in found:
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(entry)

    def result(self, outputs: Sequence[CompletionOutput]) -> RequestOutput:
        first = self.completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=list(outputs),
            finished=self.num_unfinished == 0,
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=self.first_scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_cached_tokens=first.num_cached,
                cache_report=first.hit_report,
                num_preemptions=sum(c.request.num_preemptions for c in self.completions),
            ),
        )

    def final(self) -> RequestOutput:
        """The result with the n completions that were asked for; of best_of, those of the largest mean
        log-probability, the best first, of equal ones the earlier.
        """
        chosen = self.completions
        if len(chosen) > self.params.n:
            chosen = sorted(chosen, key=lambda c: -c.mean_logprob)[: self.params.n]
            for index, completion in enumerate(chosen):
                completion.index = index
        return self.result([c.output(c.token_ids) for c in chosen])
