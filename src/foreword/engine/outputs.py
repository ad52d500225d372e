"""The outputs of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foreword.arrays import F32
from foreword.cache import CacheMiss
from foreword.errors import ForewordError, shown
from foreword.sampling import TokenLogprobs

if TYPE_CHECKING:
    from foreword.messages import Event, Message

FinishReason = Literal["stop", "length", "abort", "error"]


class Position(NamedTuple):
    """A place in a transcript."""

    pieces: int = 0
    tokens: int = 0


BEGINNING = Position()


@dataclass(slots=True, eq=False)
class Transcript:
    """The output of a completion so far: lists that only grow, so that outputs share them.

    pieces: the pieces of its text. logprobs: one entry per token, None if not requested.
    """

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None

    @property
    def end(self) -> Position:
        return Position(len(self.pieces), len(self.token_ids))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompletionOutput:
    """One completion of a prompt: its transcript up to ``end``. Everything from ``start`` on is new.

    finish_reason: "stop" (the model's end token, a stop token or a stop string), "length", "abort", "error", or None
    while it runs. stop_reason: the stop string or stop token id; None for the model's end token. cumulative_logprob: of
    the tokens, if log-probabilities were requested.
    For chats: events: the changes of the message by the new text. message: the message of the final output.
    reasoning_tokens: tokens up
    to the end of the reasoning, all of them inside it; None without reasoning.
    """

    index: int
    transcript: Transcript
    start: Position
    end: Position
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    events: tuple[Event, ...] = ()
    message: Message | None = None
    reasoning_tokens: int | None = None

    @property
    def text(self) -> str:
        """The whole text, without the stop string or stop token that ended it (unless requested). It costs O(text)."""
        return "".join(self.transcript.pieces[: self.end.pieces])

    @property
    def token_ids(self) -> list[int]:
        """All sampled tokens, including the one that ended it. It costs O(tokens)."""
        return self.transcript.token_ids[: self.end.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """A mapping for each token, None if not requested. It costs O(tokens)."""
        found = self.transcript.logprobs
        return None if found is None else found[: self.end.tokens]

    @property
    def new_text(self) -> str:
        """The text since the last output. It costs O(new text)."""
        return "".join(self.transcript.pieces[self.start.pieces : self.end.pieces])

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens since the last output."""
        return self.transcript.token_ids[self.start.tokens : self.end.tokens]

    @property
    def new_logprobs(self) -> list[TokenLogprobs] | None:
        """The log-probabilities since the last output."""
        found = self.transcript.logprobs
        return None if found is None else found[self.start.tokens : self.end.tokens]

    @property
    def num_tokens(self) -> int:
        return self.end.tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._values() == other._values()

    def __repr__(self) -> str:
        ending = f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r}"
        return f"CompletionOutput(index={self.index}, text={shown(self.text)}, {self.num_tokens} tokens, {ending})"

    def as_dict(self) -> dict[str, Any]:
        """Return its values in the form of JSON. logprobs: for each token, a list of the alternatives."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": _logprobs(self.logprobs),
            "message": None if self.message is None else self.message.as_dict(),
            "reasoning_tokens": self.reasoning_tokens,
        }

    def _values(self) -> tuple[object, ...]:
        return (
            self.index,
            self.text,
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.cumulative_logprob,
            self.message,
        )


def _logprobs(entries: Sequence[TokenLogprobs | None] | None) -> list[list[dict[str, Any]] | None] | None:
    """Return log-probabilities in the form of JSON: a list per token, whose first entry is that of the token itself."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else [
            {"token_id": token, "token": found.decoded_token, "logprob": found.logprob, "rank": found.rank}
            for token, found in entry.items()
        ]
        for entry in entries
    ]


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request. cached_tokens: prompt tokens found in the cache. reasoning_tokens: None without
    reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock, None for events that have not happened.

    num_cached_tokens: prompt tokens found in the cache; loaded_tokens: the part of them that was read from outside of
    the pool, by the name of the tier, such as "disk"; cache_report: a description in words, with the position at which
    the hit ends; cache_miss: the reason why it ends there, None if all tokens but the last one were found.
    num_preemptions: the number of its preemptions. num_output_tokens: the number of tokens that all of its completions
    sampled. num_proposed_drafts, num_accepted_drafts: the number of tokens that speculation proposed, and of those that
    were accepted and are tokens of the completions; tokens that a grammar forces are none of them.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    cache_report: str = ""
    cache_miss: CacheMiss | None = None
    num_preemptions: int = 0
    num_output_tokens: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def queue_time(self) -> float | None:
        """The time from its arrival until it is first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """The time from its arrival to its end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """The number of output tokens after the first one, per second since the first one; None before the end, or with
        fewer than two tokens.
        """
        if self.finished_time is None or self.first_token_time is None or self.num_output_tokens < 2:
            return None
        seconds = self.finished_time - self.first_token_time
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """The output of a request, final if ``finished``. token_ids and text always contain everything from the start.

    prompt_token_ids: 0 for positions with an embedding. prompt_logprobs: one entry per prompt token, if requested;
    None for the first token. error: the error because of which a completion ended with finish_reason "error", such as
    logits that are not numbers. Other requests are not affected.
    pooled: the result of a pooling request, which has one output without tokens.
    prompt_index: the index of its prompt in the list given to `LLM`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    error: ForewordError | None = None
    pooled: F32 | None = None
    prompt_index: int = 0

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    def as_dict(self) -> dict[str, Any]:
        """Return its values in the form of JSON; the error as text."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": _logprobs(self.prompt_logprobs),
            "outputs": [output.as_dict() for output in self.outputs],
            "finished": self.finished,
            "error": None if self.error is None else str(self.error),
            "pooled": None if self.pooled is None else self.pooled.tolist(),
            "metrics": asdict(self.metrics),
            "prompt_index": self.prompt_index,
        }

    def __repr__(self) -> str:
        prompt = f"prompt={shown(self.prompt)}, {len(self.prompt_token_ids)} prompt tokens"
        error = "" if self.error is None else f", error={self.error!r}"
        outputs = ", ".join(map(repr, self.outputs))
        return f"RequestOutput({self.request_id!r}, {prompt}, outputs=[{outputs}], finished={self.finished}{error})"

    def _repr_html_(self) -> str:
        from foreword.markup import table  # imported here because few programs are notebooks

        first, error = self.metrics.time_to_first_token, self.error
        about = [f"{len(self.prompt_token_ids)} prompt tokens"]
        about += [self.metrics.cache_report] if self.metrics.cache_report else []
        about += [] if first is None else [f"first token after {1e3 * first:.0f} ms"]
        about += [] if error is None else [str(error)]
        prompt = f"{len(self.prompt_token_ids)} token ids" if self.prompt is None else self.prompt
        rows = [("prompt", prompt, len(self.prompt_token_ids), "")]
        rows += [(f"output {o.index}", o.text, o.num_tokens, str(o.finish_reason or "runs")) for o in self.outputs]
        return table(f"request {self.request_id}: {'; '.join(about)}", ("", "text", "tokens", "end"), rows)

    @property
    def failure(self) -> ForewordError | None:
        """The error, if every completion ended with one."""
        return self.error if all(output.finish_reason == "error" for output in self.outputs) else None

    @property
    def continues(self) -> bool:
        """Return whether an earlier output had tokens of the first completion."""
        return self.outputs[0].start.tokens > 0

    @property
    def usage(self) -> Usage:
        """The tokens of the prompt and of these outputs."""
        reasoning = [output.reasoning_tokens for output in self.outputs if output.reasoning_tokens is not None]
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(output.num_tokens for output in self.outputs),
            cached_tokens=self.metrics.num_cached_tokens,
            reasoning_tokens=sum(reasoning) if reasoning else None,
        )

    def following(self, earlier: RequestOutput | None) -> RequestOutput:
        """Return this output for a consumer that did not read the earlier one: tokens that are new in either output are
        new in the result.
        """
        if earlier is None:
            return self
        starts = {output.index: output.start for output in earlier.outputs}
        outputs = [replace(output, start=starts.get(output.index, output.start)) for output in self.outputs]
        return replace(self, outputs=outputs)
