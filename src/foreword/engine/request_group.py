"""A user's request in the engine: its completions, with their text, log-probabilities and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from foreword.arrays import F32, I32
from foreword.batch import CheckedParams, CheckedPrompt, PoolingParams, PromptInputs, SamplingParams, StructuredOutputs
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import BlockKeys
from foreword.engine.outputs import (
    BEGINNING,
    CompletionOutput,
    FinishReason,
    Position,
    RequestMetrics,
    RequestOutput,
    Transcript,
)
from foreword.engine.text import TextStream
from foreword.errors import EngineError, ForewordError, RequestError
from foreword.sampling import Grammar, GrammarStoppedError, TokenLogprobs
from foreword.scheduler import Request
from foreword.scheduler.request import NO_SPANS

StopReason = int | str | None


class RequestOptions(TypedDict, total=False):
    """Options of a request in addition to its prompt and parameters.

    priority: smaller first (0). owner, share: whose it is, and the weight of that one, under the fair policy ("", 1.0).
    max_len: the most tokens of its prompt and its output together; None: max_model_len (None).
    lora: the name of its adapter (None).
    cache_salt: its prefix is shared with equal salts only (None). grammar: every token has to follow it, or for further
        completions its copies (None: what the parameters ask for).
    stream: report it in every step that brings new tokens, not only at its end (False). With best_of above n it is
        reported at its end alone, since only then the n completions are known.
    """

    priority: int
    owner: str
    share: float
    max_len: int | None
    lora: str | None
    cache_salt: str | None
    grammar: Grammar | None
    stream: bool


@dataclass(slots=True, eq=False)
class Completion:
    """One of the n completions of a group: a request of the scheduler, with its text and log-probabilities.

    transcript.token_ids has the tokens read so far, and all of them at the end; a completion that need not be read
    token by token is read at its end alone, until when its tokens are in the request's row. reported: the end of what
    outputs had. make_text: an empty text; None without a tokenizer, or if no text is wanted.
    row: the one it was given, -1 for none. num_drafts: draft tokens that were proposed and accepted before.
    params: of its group, as its request samples with them. grammar: its own, at the tokens read so far.
    """

    group: RequestGroup
    index: int
    request: Request
    params: SamplingParams
    end_ids: frozenset[int]
    make_text: Callable[[], TextStream] | None
    grammar: Grammar | None
    text: TextStream | None = field(init=False)
    transcript: Transcript = field(default_factory=Transcript)
    reported: Position = BEGINNING
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    error: ForewordError | None = None
    row: int = -1
    num_drafts: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.text = self.make_text() if self.make_text is not None else None
        if self.text is not None:
            self.text.pieces = self.transcript.pieces
        if self.group.params.logprobs is not None:
            self.transcript.logprobs = self.logprobs

    @property
    def reads_every_token(self) -> bool:
        """Return whether each token is read when it is sampled: for a stream, stop strings, log-probabilities or a
        grammar.
        """
        group = self.group
        return (
            group.stream
            or bool(self.params.stop_strings)
            or self.params.logprobs is not None
            or self.grammar is not None
        )

    @property
    def num_read(self) -> int:
        """The number of output tokens that were read so far."""
        return len(self.transcript.token_ids)

    def output(self) -> CompletionOutput:
        """Return the current output; everything since the previous call is marked as new."""
        start, end = self.reported, self.transcript.end
        self.reported = end
        return CompletionOutput(
            index=self.index,
            transcript=self.transcript,
            start=start,
            end=end,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=self.cumulative_logprob if self.logprobs else None,
        )

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Append the log-probabilities of the next token."""
        entry.token_bytes = self.group.token_bytes
        self.logprobs.append(entry)
        self.cumulative_logprob += _sampled_logprob(entry)

    def rewind(self) -> None:
        """Continue from the tokens that the waiting request has, after a step that failed."""
        output, transcript = self.request.output.tolist(), self.transcript
        del transcript.token_ids[len(output) :]
        del self.logprobs[self.num_read :]
        self.cumulative_logprob = sum(map(_sampled_logprob, self.logprobs))
        if self.grammar is not None:
            self.grammar.reset()
            self.grammar.accept(output)
        if self.make_text is not None:
            self.text = text = self.make_text()
            text.push(transcript.token_ids, may_stop=False)
            # Outputs share the pieces that they had.
            num_reported = sum(map(len, transcript.pieces[: self.reported.pieces]))
            transcript.pieces[self.reported.pieces :] = [text.text[num_reported:]]
            text.pieces = transcript.pieces

    def finish(self, token_ids: list[int], finish_reason: FinishReason, stop_reason: StopReason) -> None:
        """End with these tokens; the text gets the tokens not read yet, without the one that ended it."""
        if self.text is not None and self.text.stop is None:
            ended_by_token = finish_reason == "stop" and not self.params.include_stop_str_in_output
            self.text.push(token_ids[self.num_read : len(token_ids) - ended_by_token], may_stop=False)
            self.text.finish()
        self._end(token_ids, finish_reason, stop_reason, None)

    def fail(self, token_ids: list[int], error: Exception) -> None:
        """End with these tokens and an error; the text ends where it was read."""
        constraint = self.params.structured_outputs
        if isinstance(error, GrammarStoppedError):
            value = constraint.mapping() if isinstance(constraint, StructuredOutputs) else constraint
            error = RequestError(self.group.request_id, "structured_outputs", value, str(error), "Use a simpler one.")
        elif not isinstance(error, ForewordError):
            failure = EngineError(f"request {self.group.request_id!r}: {type(error).__name__}: {error}")
            failure.__cause__, error = error, failure
        if isinstance(error, RequestError) and isinstance(constraint, StructuredOutputs) and constraint.origin:
            error = error.renamed({"structured_outputs": constraint.origin.field})
        self._end(token_ids, "error", None, error)

    def _end(
        self, token_ids: list[int], reason: FinishReason, stop_reason: StopReason, error: ForewordError | None
    ) -> None:
        self.transcript.token_ids[self.reported.tokens :] = token_ids[self.reported.tokens :]
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.group.num_unfinished -= 1

    @property
    def mean_logprob(self) -> float:
        """The value cumulative_logprob / tokens, which compares outputs of different lengths; −∞ without tokens."""
        return self.cumulative_logprob / len(self.logprobs) if self.logprobs else -math.inf


def _sampled_logprob(entry: TokenLogprobs) -> float:
    """Return the log-probability of the sampled token, which is the first of the entry."""
    return entry.chosen.logprob


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A checked request: a prompt and its n (or best_of) completions. stream: reported at every new token.

    text: of the prompt, if it was given as one. token_bytes: what a token adds to a text. sampling: of all completions.
    max_len, keys, inputs, spans: see `Request`. pooling_params: of a pooling request, which has one completion, without
    tokens; pooled: its result. siblings: completions that wait until the first one has computed the prompt. lora: the
    name of its adapter; lora_id: the number, which it gets when it enters the engine, and which is not in ``keys``.
    """

    request_id: str
    text: str | None
    prompt: CheckedPrompt
    sampling: CheckedParams
    max_len: int
    stream: bool
    arrival_time: float
    priority: int = 0
    owner: str = ""
    share: float = 1.0
    lora: str | None = None
    lora_id: int = 0
    keys: BlockKeys = field(default_factory=lambda: NO_KEYS)
    inputs: PromptInputs = field(default_factory=PromptInputs)
    spans: I32 = field(default_factory=lambda: NO_SPANS)
    grammar: Grammar | None = None
    pooling_params: PoolingParams | None = None
    pooled: F32 | None = None
    completions: list[Completion] = field(default_factory=list)
    siblings: list[Completion] = field(default_factory=list)
    num_unfinished: int = 0
    token_bytes: Callable[[int], bytes] | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    _token_ids: list[int] | None = None  # the prompt as a list, made for the first output

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params

    def add_prompt_logprobs(self, found: Sequence[tuple[int, TokenLogprobs]]) -> None:
        """Append the entries of a step; those that a preempted request computes again are skipped."""
        for position, entry in found:
            if position == len(self.prompt_logprobs):
                entry.token_bytes = self.token_bytes
                self.prompt_logprobs.append(entry)

    def result(self, chosen: Sequence[Completion]) -> RequestOutput:
        """Return the state of the request, with what these completions have."""
        first, error = self.completions[0].request, None
        if self._token_ids is None:
            self._token_ids = self.prompt.token_ids.tolist()
        preemptions = tokens = proposed = accepted = 0
        for completion in self.completions:
            error = error or completion.error
            preemptions += completion.request.num_preemptions
            tokens += len(completion.transcript.token_ids)
            proposed += completion.num_drafts[0]
            accepted += completion.num_drafts[1]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=self._token_ids,
            outputs=[completion.output() for completion in chosen],
            finished=self.num_unfinished == 0,
            error=error,
            pooled=self.pooled,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=self.first_scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_cached_tokens=first.num_cached,
                loaded_tokens=first.loaded_tokens,
                cache_report=first.hit_report,
                cache_miss=first.cache_miss,
                num_preemptions=preemptions,
                num_output_tokens=tokens,
                num_proposed_drafts=proposed,
                num_accepted_drafts=accepted,
            ),
        )

    def final(self) -> RequestOutput:
        """Return the result with n completions: of best_of, those of largest mean log-probability, in this order."""
        chosen = self.completions
        if len(chosen) > self.params.n:
            chosen = sorted(chosen, key=lambda c: -c.mean_logprob)[: self.params.n]
            for index, completion in enumerate(chosen):
                completion.index = index
        return self.result(chosen)
