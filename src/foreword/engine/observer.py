"""Observers of an engine: what happens to requests, steps and cached content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from foreword.batch import InputBatch
from foreword.cache import CacheEvent
from foreword.engine.outputs import RequestOutput
from foreword.errors import ConfigError
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan


class EngineObserver:
    """The base of observers; override the methods of interest. All are called in the thread that steps the engine.

    A step whose observer raises is cancelled: its requests wait again, and `Engine.step` raises the error. If
    step_committed, step_failed, request_ended or cache_event raises, nothing is undone, and the outputs of the step are
    returned by the next call of `Engine.step`. If request_added raises, the request is aborted.
    """

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request entered the engine."""

    def request_ended(self, output: RequestOutput) -> None:
        """A request ended, or was aborted."""

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        """A step is about to run: its batch is final."""

    def step_ran(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        """The executor returned the step's samples; they are not committed."""

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        """The step's samples are in the states; requests that they end still have rows."""

    def step_failed(self, error: BaseException) -> None:
        """A step raised, and what it did is undone: the unfinished requests have left their rows, and wait again."""

    def cache_event(self, event: CacheEvent) -> None:
        """The cached content changed. Delivered in order, after the step or call that caused it."""


NO_ERRORS: tuple[Exception, ...] = ()


class Observers:
    """The observers of one engine. Each receives every event; the first error is raised after all of them were called.

    `notify` calls at once; `notify_done` too, but keeps errors until `deliver`, for what cannot be undone. `post`
    keeps the event itself until `deliver`, for events inside a change of the engine's state.
    members: the observers; with none of them a step skips these calls.
    """

    def __init__(self, observers: Iterable[EngineObserver] = ()) -> None:
        self.members = list(observers)
        self._calls: dict[str, list[Callable[..., None]]] = {}  # by method: those of the members that override it
        self._posted: list[tuple[str, tuple[object, ...]]] = []
        self._errors: list[Exception] = []
        self.wants_cache_events = any(map(observes_cache, self.members))

    def add(self, observer: EngineObserver) -> None:
        """Add an observer.

        Raise ConfigError if it overrides cache_event and the engine was made without one that does.
        """
        if observes_cache(observer) and not self.wants_cache_events:
            raise ConfigError(
                f"observers: {type(observer).__name__} overrides cache_event, for which blocks are named from the "
                "engine's start; pass it to Engine(observers=[...])"
            )
        self.members.append(observer)
        self._calls = {}

    def remove(self, observer: EngineObserver) -> None:
        """Remove an observer that was added."""
        self.members.remove(observer)
        self._calls = {}

    def notify(self, method: str, *arguments: object) -> None:
        """Call a method of every observer."""
        if errors := self._call(method, arguments):
            raise errors[0]

    def notify_done(self, method: str, *arguments: object) -> None:
        """Call a method of every observer; an error is raised by `deliver`."""
        if errors := self._call(method, arguments):
            self._errors += errors

    def post(self, method: str, *arguments: object) -> None:
        """Keep an event for `deliver`."""
        if self.members:
            self._posted.append((method, arguments))

    def deliver(self) -> None:
        """Call the observers for every posted event, in order, then raise the first error since the last call."""
        if self._posted:
            posted, self._posted = self._posted, []
            self._errors += [error for method, arguments in posted for error in self._call(method, arguments)]
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]

    def _call(self, method: str, arguments: tuple[object, ...]) -> Sequence[Exception]:
        errors = NO_ERRORS
        for call in self._calls[method] if method in self._calls else self._find(method):
            try:
                call(*arguments)
            except Exception as error:
                errors = (*errors, error)
        return errors

    def _find(self, method: str) -> list[Callable[..., None]]:
        """Return the methods with this name of the members that override it, and keep them until members change."""
        inherited = getattr(EngineObserver, method)
        found: list[Callable[..., None]] = [getattr(observer, method) for observer in self.members]
        self._calls[method] = [call for call in found if getattr(call, "__func__", None) is not inherited]
        return self._calls[method]


def observes_cache(observer: EngineObserver) -> bool:
    """Return whether the observer overrides cache_event."""
    return type(observer).cache_event is not EngineObserver.cache_event


@dataclass(slots=True, eq=False)
class EngineMetrics(EngineObserver):
    """Counts since it was added.

    num_steps, num_tokens: committed steps, and the tokens that they computed, drafts included.
    num_sampled_tokens: output tokens of ended requests. num_preemptions: preemptions by committed steps.
    num_requests_added, num_requests_ended: requests, however many completions each has.
    num_prompt_tokens, num_cached_tokens: prompt tokens of ended requests, and how many of them the cache had.
    loaded_tokens: how many of these were read from outside the pool, by tier.
    num_proposed_drafts, num_accepted_drafts: of ended requests, see `RequestMetrics`.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_requests_added: int = 0
    num_requests_ended: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """The ratio num_cached_tokens / num_prompt_tokens, 0 before the first request ends."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        self.num_requests_added += 1

    def request_ended(self, output: RequestOutput) -> None:
        self.num_requests_ended += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.metrics.num_cached_tokens
        self.loaded_tokens.update(output.metrics.loaded_tokens)
        self.num_proposed_drafts += output.metrics.num_proposed_drafts
        self.num_accepted_drafts += output.metrics.num_accepted_drafts
        self.num_sampled_tokens += sum(completion.num_tokens for completion in output.outputs)

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_preemptions += len(plan.preempted)
