"""Speculation in the engine: a drafter, the number of drafts of each row, and the counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from foreword.arrays import I32, Bools
from foreword.batch import InputBatch, RequestStates
from foreword.engine.speculation.adaptive import DraftLengths, SpeculationStats
from foreword.engine.speculation.config import SpeculationConfig
from foreword.engine.speculation.costs import StepCosts
from foreword.engine.speculation.lookup import LookupDrafter
from foreword.engine.speculation.probes import Probes
from foreword.errors import ConfigError, PlanError, shown
from foreword.native import native
from foreword.plugins import made
from foreword.scheduler import Scheduler, StepPlan


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that may follow the last known token of rows of the engine's `RequestStates`.

    relative_cost: the cost of drafting one token for a batch, relative to a step of the target; 0 where negligible.
    """

    relative_cost: float

    def propose(self, rows: I32, most: I32) -> I32:
        """Propose up to most[i] drafts for rows[i], as [n, k] padded with −1, where max(most) ≤ k ≤
        max_num_draft_tokens.
        """


@runtime_checkable
class FollowingDrafter(Drafter, Protocol):
    """A drafter that reads steps of the target."""

    def follow(self, batch: InputBatch, sampled: I32, wanted: Bools) -> None:
        """Follow a step that was committed with these tokens, [B] or [B, D + 1]; its executor has not begun another
        one.

        wanted: [B], whether drafts of the request may be proposed next. The others should cost no time.
        """


AWAKE, RESTS, RESTED = 0, 1, 2
RATES = 0.5, 0.6, 0.75, 0.85  # that drafts are right at first: of any drafter, and after 2, 3 to 4, 5 or more tokens
KINDS = np.array([0, 1, 1, 2, 2, 3], np.int32)  # by the length of a match: which of these


class Speculation:
    """Proposes drafts for rows, and adapts their number to the acceptance in each step and to the time of steps.

    For rows whose drafts are not worth verifying, a draft is still made and compared with the sampled token, to notice
    when drafts become right: in every step with a drafter that costs nothing, else in a few steps, of all rows at the
    same time, since a step of the drafter takes about as long for one row as for all.
    """

    def __init__(
        self,
        states: RequestStates,
        config: SpeculationConfig,
        drafter: Callable[[RequestStates], Drafter] | None = None,
    ) -> None:
        if drafter is None and config.method in ("draft_model", "head"):
            raise ConfigError(f"speculation method={config.method!r} needs a drafter that runs it; use build_engine")
        self._lookup: LookupDrafter | None = None
        if drafter is None:
            self._lookup = LookupDrafter(states, config)
            self.drafter: Drafter = self._lookup
        else:
            self.drafter = made("drafter", drafter, states, kind=Drafter)
        num_tokens = states.max_num_reqs * (states.max_num_draft_tokens + 1)
        self.lengths = DraftLengths(
            states.max_num_reqs,
            config.num_tokens,
            adaptive=config.adaptive,
            costs=StepCosts(num_tokens, overhead=config.step_overhead, saturated=config.saturated_cost),
            relative_cost=self.drafter.relative_cost,
            rates=RATES,
        )
        self._follows = self.drafter if isinstance(self.drafter, FollowingDrafter) else None
        self.stats = SpeculationStats.empty(config.num_tokens)
        self._policy = self.lengths.native_policy(self.stats)
        self._states, self._most = states, config.num_tokens
        self._guess = np.full(states.max_num_reqs, -1, np.int32)  # by row: the draft of the next token, −1 for none
        self._kind = np.zeros(states.max_num_reqs, np.int32)  # by row: of its last drafts, see RATES
        self._is_wanted = np.ones(states.max_num_reqs, np.bool_)  # by row: whether a drafter that costs time has to run
        # By row, of a drafter that costs time: RESTS while its drafts are hopeless, RESTED when the drafter knows.
        self._rests = np.zeros(states.max_num_reqs, np.int8)
        self.probes = Probes(self.drafter.relative_cost, follows=self._follows is not None)
        self.clock = time.perf_counter
        self._drafting = 0.0  # seconds of a drafter that costs time in the step that is committed
        self._has_guesses = False  # whether the last rows had one
        self._decoded: I32 | None = None  # the rows of the last step, if it only decoded

    def start(self, row: int) -> None:
        """Begin with a request that was admitted to the row."""
        self.lengths.start(row)
        self._guess[row] = -1
        self._rests[row] = AWAKE
        if self._follows is not None:
            one = np.array([row], np.int32)
            self._is_wanted[row] = self.lengths.choose(one, np.full(1, self._most, np.int32), self._kind[one])[0] > 0

    def propose(self, rows: I32, room: I32) -> I32 | None:
        """Return drafts for these rows, at most room[i], as many as are worth verifying: [n, k] padded with −1.

        None if there are none.
        """
        self._has_guesses = False
        if self._follows is not None and not self.probes.are_due and self._rests.take(rows).min() >= RESTS:
            return None
        if not (self.lengths if self._policy is None else self._policy).can_gain(len(rows)):
            self._guess[rows], self._is_wanted[rows] = -1, False
            self.lengths.choose_none(rows)
            return None
        most, takes_time = np.minimum(np.maximum(room, 0), self._most), self.drafter.relative_cost > 0
        if takes_time:
            chosen = self.lengths.choose(rows, most, self._kind[rows])
            self._is_wanted[rows] = chosen > 0
            most = np.maximum(chosen, most > 0) if self.probes.are_due else chosen
            if not most.any():
                self._guess[rows] = -1
                self._rests[rows] = self.lengths.are_hopeless(rows, self._kind[rows])  # True: RESTS
                return None
        begin = self.clock() if takes_time else 0.0
        drafts = self.drafter.propose(rows, most)
        self._drafting += self.clock() - begin if takes_time else 0.0
        self._check(drafts, len(rows))
        self._guess[rows] = first = drafts[:, 0]
        self._has_guesses = int(first.max()) >= 0
        if not self._has_guesses:
            if not takes_time:
                self.lengths.choose_none(rows)
            return None
        if self._lookup is not None:
            self._kind[rows] = KINDS.take(self._lookup.match_lengths, mode="clip")
            if self._policy is not None:
                return self._worth(self._policy, rows, drafts)
        if not takes_time:
            chosen = self.lengths.choose(rows, (drafts >= 0).sum(1, dtype=np.int32), self._kind[rows])
        if not chosen.any():
            return None
        return np.where(np.arange(drafts.shape[1]) < chosen[:, None], drafts, np.int32(-1))

    def _worth(self, policy: native.DraftPolicy, rows: I32, drafts: I32) -> I32 | None:
        """Return the drafts that are worth verifying, in place; None if none are."""
        credit = self.lengths.credit.steps
        if credit <= 0:
            self.lengths.choose_none(rows)
            return None
        return drafts if policy.choose(rows, drafts, self._kind.take(rows), credit) else None

    def _check(self, drafts: object, num_rows: int) -> None:
        """Raise PlanError for drafts that are no int32 [num_rows, 1 … max_num_draft_tokens]."""
        most = self._states.max_num_draft_tokens
        if isinstance(drafts, np.ndarray):
            if (
                drafts.dtype == np.int32
                and drafts.ndim == 2
                and len(drafts) == num_rows
                and 1 <= drafts.shape[1] <= most
            ):
                return
            got = f"{drafts.dtype} {list(drafts.shape)}"
        else:
            got = shown(drafts)
        name, expected = type(self.drafter).__name__, f"int32 [{num_rows}, 1 … {most}]"
        raise PlanError(f"{name}.propose returned no drafts", tensor="draft_tokens", expected=expected, got=got)

    def follow(self, batch: InputBatch, sampled: I32) -> None:
        """Follow a step that was committed with these tokens."""
        self.probes.num_steps += 1
        rows, is_due = batch.idx_mapping, self.probes.are_due
        if self._follows is not None and (is_due or self._rests.take(rows).min() < RESTED):
            begin = self.clock()
            self._follows.follow(batch, sampled, is_due | self._is_wanted[rows])
            self._drafting += self.clock() - begin
            self._rests[rows] = np.where(is_due | (self._rests[rows] == AWAKE), AWAKE, RESTED)

    def propose_next(self, scheduler: Scheduler, rows: I32) -> None:
        """Propose drafts for the next step of rows that continue, within their length limits."""
        if len(rows):
            room = scheduler.running.max_len.take(rows) - self._states.num_tokens.take(rows) - 1
            drafts = self.propose(rows, room)
            if drafts is not None:
                scheduler.drafts.propose(rows, drafts)

    def reserve_draft_slots(self, scheduler: Scheduler, in_flight: StepPlan) -> None:
        """Reserve slots for the drafts that may be proposed once the samples of the step in flight are known."""
        states = self._states
        rows = in_flight.rows[states.num_placeholders[in_flight.rows] > 0]
        room = scheduler.running.max_len[rows] - states.num_tokens[rows] - states.num_placeholders[rows] - 1
        scheduler.drafts.reserve(rows, np.minimum(self.lengths.most_next(rows), np.maximum(room, 0)))

    def learn(self, plan: StepPlan, sampled: I32, is_forced: Bools) -> None:
        """Compare the drafts with the step's samples, [B] or [B, D + 1] padded with −1. is_forced: by row, whether its
        drafts are a grammar's, which say nothing of the drafter.
        """
        if plan.draft_tokens is None and not self._has_guesses:
            self.lengths.credit.add(0.0)
            return
        sampled, rows, drafts = sampled.reshape(len(sampled), -1), plan.rows, plan.draft_tokens
        own = ~is_forced.take(rows)
        if not own.all():
            sampled, rows, drafts = sampled[own], rows[own], None if drafts is None else drafts[own]
        if self._policy is None:
            counts = self._judge(rows, sampled, drafts)
        else:
            counts = self._policy.judge(rows, sampled, drafts, self._guess, self._kind)
        num_verified, num_drafted, num_accepted, num_judged, num_right = counts
        lengths = self.lengths
        if drafts is None:
            lengths.credit.add_unverified((2 * num_right - num_judged) / len(plan.rows))
        else:
            self.stats.count(num_verified, num_drafted, num_accepted)
            lengths.credit.add(lengths.gain(len(plan.rows), num_drafted, num_accepted))

    def _judge(self, rows: I32, sampled: I32, drafts: I32 | None) -> tuple[int, int, int, int, int]:
        """Update the rates of these rows. Return how many rows had drafts, how many drafts these were and how many of
        them were accepted, and how many drafts and guesses were judged and right.
        """
        guess, kinds = self._guess[rows], self._kind[rows]
        judged = (guess >= 0).astype(np.int32)
        right = judged * (guess == sampled[:, 0])
        drafted = accepted = np.zeros_like(judged)
        if drafts is not None:
            drafted = (drafts >= 0).sum(1, dtype=np.int32)
            accepted = (sampled >= 0).sum(1, dtype=np.int32) - 1
            accepted = np.minimum(np.maximum(accepted, 0), drafted)
            judged, right = np.maximum(drafted, judged), np.where(drafted > 0, accepted, right)
            self.stats.add_places(drafted, accepted)
        self.lengths.update(rows, kinds, judged, right)
        num_verified = int(np.count_nonzero(drafted))
        return num_verified, int(drafted.sum()), int(accepted.sum()), int(judged.sum()), int(right.sum())

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the time of a step what drafts cost."""
        if self.drafter.relative_cost > 0:
            seconds -= self._drafting
            self.probes.measure(seconds, self._drafting)
            self._drafting = 0.0
        if len(plan.prefilling):
            self._decoded = None
            return
        self.lengths.costs.measure(plan.num_tokens, seconds, follows=plan.rows is self._decoded)
        self._decoded = plan.rows
