"""Logits processors: they change the logits of some requests before their tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from foreword.arrays import F32
from foreword.batch import BatchUpdate, BatchUpdates, RequestStates, SamplingParams, StepNeeds
from foreword.errors import ConfigError, RequestError, shown
from foreword.sampling.masks import TokenMasks
from foreword.sampling.row_rules import RowRules
from foreword.sampling.rows import LogitRows, RowValues
from foreword.versions import Memo


@runtime_checkable
class LogitsProcessor(Protocol):
    """Change the logits of the requests in ``rows``.

    rows: a value for each state row that it applies to. extra_args: the names in `SamplingParams.extra_args` it reads.
    """

    rows: RowValues[Any]
    extra_args: frozenset[str]

    def update(self, change: BatchUpdate) -> None:
        """Follow a change of the state rows, usually by ``self.rows.update``."""

    def apply(self, logits: F32, at: LogitRows) -> None:
        """Change logits [N, V] in place. Row i is at.rows[i]'s; every one of them is in ``rows``."""


@dataclass(slots=True, eq=False)
class StepSampling:
    """The inputs of the sampler in one step besides the batch and its logits. Not to be changed; not frozen, for speed.

    step: of the batch's requests [B]. rules: of its states, up to date. processors: custom ones that apply to some
    of these requests, in order. masks: applied before rules and processors.
    """

    step: StepNeeds
    rules: RowRules
    processors: tuple[LogitsProcessor, ...] = ()
    masks: TokenMasks | None = None


class Processors:
    """The processors that change the logits of some states' requests: the rules of `SamplingParams`, then custom
    processors in order.

    custom: processors over the rows of ``states``. eos_token_ids: the model's end tokens, for min_tokens.
    """

    def __init__(
        self, states: RequestStates, custom: Iterable[LogitsProcessor] = (), *, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._rules = RowRules(states, eos_token_ids)
        self._all: tuple[LogitsProcessor, ...] = tuple(custom)
        self._active: tuple[LogitsProcessor, ...] = ()  # processors that apply to some row
        for one in self._all:
            if not isinstance(one.rows, RowValues) or not isinstance(one.extra_args, frozenset):
                raise ConfigError(
                    f"logits_processors={shown(one)}: its rows must be RowValues, its extra_args a frozenset"
                )
        self._extra_args: frozenset[str] = frozenset().union(*(p.extra_args for p in self._all))
        self._updates = BatchUpdates(states) if self._all else None  # observed states change more slowly
        # These belong to steps without custom processors and masks, by their needs; steps in flight alternate.
        self._plain = Memo[StepNeeds, StepSampling](size=2)
        self._is_behind = True  # a processor may have missed changes: before the first update, after one that failed

    def check(self, request_id: str, params: SamplingParams) -> None:
        """Raise RequestError for an entry of extra_args that no processor reads."""
        for name in params.extra_args or ():
            if name not in self._extra_args:
                known = ", ".join(sorted(self._extra_args)) or "none"
                raise RequestError(
                    request_id, "extra_args", name, f"no logits processor reads it; those read: {known}", "Remove it."
                )

    def update(self) -> None:
        """Follow the changes of the rows since the last call. Call it between an admission and its first step."""
        if self._updates is None:
            return
        was_behind, self._is_behind = self._is_behind, True
        change = self._updates.take_all() if was_behind else self._updates.take()
        if change:
            for processor in self._all:
                processor.update(change)
            self._active = tuple(p for p in self._all if len(p.rows))
        self._is_behind = False

    def step(self, step: StepNeeds, masks: TokenMasks | None = None) -> StepSampling:
        """Return the sampling of a step over the requests of ``step``."""
        active = self._active
        if active:
            active = tuple(p for p in active if p.rows.mask.take(step.rows).any())
        is_plain = not active and masks is None
        if is_plain and (known := self._plain.find(step)) is not None:
            return known
        self._rules.update(step)
        sampling = StepSampling(step, self._rules, active, masks)
        return self._plain.keep(step, sampling) if is_plain else sampling

    def close(self) -> None:
        """Stop observing the states."""
        if self._updates is not None:
            self._updates.close()
