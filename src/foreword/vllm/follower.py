"""Follow the steps of one model runner of vLLM: the decisions of its scheduler, its tensors and its samples."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch import RequestStates, stage_mrope_positions
from foreword.check_options import CheckOptions
from foreword.names import counted
from foreword.shadow import Finding, FindingError, Shadow
from foreword.shadow.outlets import Outlets, shadow_of
from foreword.vllm.metrics import Counters

LOGGER = logging.getLogger("vllm.foreword")
MAX_PENDING = 64
"""The number of steps whose samples may be missing at the same time."""

T = TypeVar("T")
Rotary = Mapping[str, tuple[Any, int]]
"""{req_id: (positions [dims, tokens], delta)} of newly admitted requests."""


class Values(Protocol):
    """The tensors of a step, some of which may still be copied to the host."""

    @property
    def is_ready(self) -> bool: ...

    def arrays(self) -> dict[str, Any]:
        """Return the tensors by name, after the copies to the host are done."""


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """The tokens that grammars allow in a step. req_ids: the requests in the order of rows; each has one row, and one
    more per draft.

    bitmask: int32 [rows, ceil(V / 32)], bit i of word w of a row allows token 32 · w + i.
    """

    req_ids: Sequence[str]
    bitmask: I32
    num_drafts: Mapping[str, int]

    def refused(self, sampled: Mapping[str, Sequence[int]]) -> list[tuple[str, int, int]]:
        """Return (req_id, place, token) of the first sampled token of each request that its grammar does not allow."""
        found, first = [], 0
        for req_id in self.req_ids:
            rows = 1 + self.num_drafts.get(req_id, 0)
            for i, token in enumerate(sampled.get(req_id, ())[:rows]):
                if not self.bitmask[first + i, token >> 5] >> (token & 31) & 1:
                    found.append((req_id, i, token))
                    break
            first += rows
        return found


@dataclass(slots=True, eq=False)
class FollowedStep:
    """One decision of the scheduler, and what the runner made of it."""

    output: Any
    is_compared: bool
    req_ids: Sequence[str] | None = None
    values: Values | None = None
    rotary: Rotary = field(default_factory=dict)
    grammar: Grammar | None = None
    sampled: Mapping[str, Sequence[int]] | None = None


class Follower:
    """Follows a runner by `decide`, `step` and `commit` for each of its steps. They raise nothing except FindingError
    where the options ask for it. A fault of the check itself is logged once, and the engine continues unchecked.

    is_queued: the runner prepares a step before the samples of the one before are known, or its tensors are on a
    device. Then a step is checked when its samples and tensors have arrived, and the objects that are passed must not
    change.
    has_drafts: the runner has the drafts itself and the scheduler is given −1 for each, so that they are not compared.
    """

    def __init__(
        self,
        shadow: Shadow,
        options: CheckOptions,
        *,
        max_num_batched_tokens: int,
        is_queued: bool = False,
        has_drafts: bool = False,
        title: str = "vLLM",
        log: Callable[[str], None] = LOGGER.error,
    ) -> None:
        self.shadow, self.options, self.is_queued, self._has_drafts = shadow, options, is_queued, has_drafts
        self.failure = ""
        self._title, self._log = title, log
        self._steps: deque[FollowedStep] = deque()
        self._current: FollowedStep | None = None
        self._num_decided = 0
        self._without_parameters: set[str] = set()  # requests whose parameters are not supported here
        self._counters = Counters.of_process()
        self._outlets = Outlets(
            shadow,
            options,
            title=title,
            max_num_batched_tokens=max_num_batched_tokens,
            log=log,
            report=self.report,
            at_end=partial(LOGGER.info, "%s"),
        )

    @classmethod
    def of(
        cls,
        states: RequestStates,
        options: CheckOptions,
        *,
        max_num_batched_tokens: int,
        is_queued: bool = False,
        has_drafts: bool = False,
        title: str = "vLLM",
        log: Callable[[str], None] = LOGGER.error,
        **others: Any,
    ) -> Follower:
        """Return a follower with a `Shadow` of these states. others: the other arguments of `Shadow`."""
        shadow = shadow_of(states, options, log=log, max_num_batched_tokens=max_num_batched_tokens, **others)
        return cls(
            shadow,
            options,
            max_num_batched_tokens=max_num_batched_tokens,
            is_queued=is_queued,
            has_drafts=has_drafts,
            title=title,
            log=log,
        )

    # -- called by the hooks, in this order ----------------------------------------------------------------------------

    def decide(self, output: Any) -> FollowedStep | None:
        """Follow a SchedulerOutput before the runner changes its states. Return the step; None if it is unchecked."""
        return self._guarded(partial(self._decide, output))

    def step(self, req_ids: Sequence[str], collect: Callable[[], Values], rotary: Callable[[], Rotary] = dict) -> None:
        """Follow the tensors that the runner prepared for the last decision. ``collect`` is called if the step is
        compared.
        """
        self._guarded(partial(self._step, req_ids, collect, rotary))

    def constrain(self, collect: Callable[[], Grammar]) -> None:
        """Follow the grammars that apply to the samples of the last decision."""
        self._guarded(partial(self._constrain, collect))

    def commit(self, step: FollowedStep | None, collect: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        """Follow the samples of a step, without those that the engine discards. Any thread may call it if
        ``is_queued``.
        """
        if step is not None:
            self._guarded(partial(self._commit, step, collect))

    @property
    def current(self) -> FollowedStep | None:
        """The last decision; None if it is unchecked."""
        return None if self.failure else self._current

    def report(self) -> str:
        """Return the number of checked steps and the findings so far."""
        self._guarded(self._drain)
        lines = [f"foreword: {self._title}, check={self.options.level}", str(self.shadow.report())]
        if self.is_queued and self._steps:
            lines.append(f"{counted(len(self._steps), 'step')} in flight")
        if self.failure:
            lines.append(f"the check ended early: {self.failure}")
        return "\n".join(lines)

    def close(self) -> None:
        """Log the report, and finish the files. A second call does nothing."""
        try:
            self._outlets.close()
        except Exception as error:  # any error: the engine still ends normally
            self._fail(error)

    # -- how they do it ------------------------------------------------------------------------------------------------

    def _decide(self, output: Any) -> FollowedStep:
        if self.is_queued:
            self._drain()
            if len(self._steps) > MAX_PENDING:
                raise RuntimeError(f"the samples of {MAX_PENDING} steps never came")
        is_compared = self._num_decided % self.options.every == 0
        self._num_decided += 1
        self._current = step = FollowedStep(kept(output, self.is_queued), is_compared)
        if not output.total_num_scheduled_tokens:
            step.sampled = {}
        if self.is_queued:
            self._steps.append(step)
        else:
            self._apply(step)
        return step

    def _step(self, req_ids: Sequence[str], collect: Callable[[], Values], rotary: Callable[[], Rotary]) -> None:
        step = self._current
        if step is None or step.req_ids is not None:
            return
        step.req_ids, step.rotary = list(req_ids), rotary()
        if step.is_compared:
            step.values = collect()
        if not self.is_queued:
            self._compare(step)

    def _constrain(self, collect: Callable[[], Grammar]) -> None:
        if self._current is not None:
            self._current.grammar = collect()

    def _commit(self, step: FollowedStep, collect: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        if step.sampled is None:
            step.sampled = collect()
            if not self.is_queued:
                self._finish(step)

    def _drain(self) -> None:
        """Check the steps whose samples and tensors have arrived."""
        while self._steps:
            step = self._steps[0]
            if step.sampled is None or not (step.values is None or step.values.is_ready):
                return
            self._steps.popleft()
            self._apply(step)
            if step.req_ids is not None:
                self._compare(step)
            self._finish(step)

    def _apply(self, step: FollowedStep) -> None:
        output, without = step.output, self._without_parameters
        self.shadow.decide(output)
        if without:
            without.difference_update(output.finished_req_ids)
        for data in output.scheduled_new_reqs:
            if not has_parameters(self.shadow.states, data.req_id):
                without.add(data.req_id)

    def _compare(self, step: FollowedStep) -> None:
        states, req_ids = self.shadow.states, step.req_ids or ()
        for req_id, (positions, delta) in step.rotary.items():
            if req_id in states:
                stage_mrope_positions(states, req_id, np.asarray(positions), delta)
        tensors = {} if step.values is None else step.values.arrays()
        if self._without_parameters:
            tensors = _masked(tensors, np.array([rid in self._without_parameters for rid in req_ids], np.bool_))
        if self._has_drafts and step.output.scheduled_spec_decode_tokens and "input_ids" in tensors:
            hidden = placeholders_of(step.output, req_ids)
            tensors = {**tensors, "input_ids": np.ma.array(tensors["input_ids"], mask=hidden)}
        found = self.shadow.step(req_ids, tensors)
        self._counters.count(step.is_compared, found)
        self._outlets.step(tensors, found, preempted_of(step.output))

    def _finish(self, step: FollowedStep) -> None:
        sampled = step.sampled or {}
        if step.grammar is not None:
            for req_id, place, token in step.grammar.refused(sampled):
                self.shadow.add(self._of_grammar(req_id, place, token))
        self._counters.count(False, self._outlets.commit(sampled))

    def _of_grammar(self, req_id: str, place: int, token: int) -> Finding:
        text = f"sample {place} of the request in this step"
        expected, step = "a token that its grammar allows", self.shadow.num_steps
        return Finding(step, "sampled", None, (place,), req_id, expected, token, 1, "runner", text)

    # -- faults of the check itself ------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], T]) -> T | None:
        if self.failure:
            return None
        try:
            return call()
        except FindingError:
            raise
        except Exception as error:  # any error: the engine continues
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._steps.clear()
        LOGGER.debug("the check failed", exc_info=True)
        self._log(f"the check failed, and the engine goes on unchecked ({self.failure})")


def kept(output: Any, is_queued: bool) -> Any:
    """Return a SchedulerOutput with embeddings in float32, copied if queued, because its lists grow later."""
    new = [_kept_request(data, is_queued) for data in output.scheduled_new_reqs]
    if not is_queued:
        changed = any(a is not b for a, b in zip(new, output.scheduled_new_reqs, strict=True))
        return _with(output, scheduled_new_reqs=new) if changed else output
    cached = output.scheduled_cached_reqs
    cached = _with(
        cached,
        new_block_ids=[None if ids is None else tuple(map(list, ids)) for ids in cached.new_block_ids],
        all_token_ids={req_id: list(ids) for req_id, ids in cached.all_token_ids.items()},
    )
    return _with(output, scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def _kept_request(data: Any, is_queued: bool) -> Any:
    changes: dict[str, Any] = {}
    if data.prompt_embeds is not None:
        changes["prompt_embeds"] = data.prompt_embeds.float().numpy()
    if is_queued:
        changes["block_ids"] = tuple(map(list, data.block_ids))
        if data.prefill_token_ids is not None:
            changes["prefill_token_ids"] = list(data.prefill_token_ids)
    return _with(data, **changes) if changes else data


def _with(value: Any, **changes: Any) -> Any:
    """Return a copy of an object with other attributes."""
    copied = copy(value)
    for name, change in changes.items():
        setattr(copied, name, change)
    return copied


def has_parameters(states: RequestStates, req_id: str) -> bool:
    """Return whether a request was admitted with its sampling parameters, all of which are supported here."""
    return req_id in states and states.row_of(req_id) in states.sampling.params


def _masked(tensors: Mapping[str, Any], mask: Bools) -> dict[str, Any]:
    """Return the tensors without the sampling parameters of these requests."""
    return {
        name: np.ma.array(value, mask=mask) if name.startswith("sampling.") else value
        for name, value in tensors.items()
    }


def placeholders_of(output: Any, req_ids: Sequence[str]) -> Bools:
    """Return which tokens of a step, [T], are drafts of a request that was given −1 in their place."""
    drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
    n = np.array([counts[rid] for rid in req_ids], np.int64)
    told = [drafts.get(rid, ()) for rid in req_ids]
    k = np.array([len(ids) if min(ids, default=0) < 0 else 0 for ids in told], np.int64)
    first: I64 = np.repeat(np.cumsum(n) - k, n)
    return np.arange(len(first)) >= first


def preempted_of(output: Any) -> Collection[str]:
    """Return the requests that a SchedulerOutput preempts."""
    return output.preempted_req_ids or ()
