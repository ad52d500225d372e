"""Speculation as the engine uses it: a drafter, how many drafts each row gets, and the counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.engine.speculation.adaptive import DraftLengths, SpeculationStats
from foreword.engine.speculation.config import SpeculationConfig
from foreword.engine.speculation.drafter import Drafter
from foreword.engine.speculation.lookup import LookupDrafter
from foreword.errors import ConfigError
from foreword.scheduler import StepPlan

PROBE_EVERY = 16  # tokens of a row, where a guess costs a run of the draft model


class Speculation:
    """Proposes drafts for rows, and learns from each step what they were worth.

    A row whose drafts are not worth verifying is still guessed for, and the guess held against the token that comes,
    so that better times are noticed: each token where guessing is free, now and then where it is not.
    """

    def __init__(
        self,
        states: RequestStates,
        config: SpeculationConfig,
        drafter: Callable[[RequestStates], Drafter] | None = None,
    ) -> None:
        if drafter is None and config.method == "draft_model":
            raise ConfigError("speculation method='draft_model' needs a drafter that runs the model; see build_engine")
        self.drafter: Drafter = drafter(states) if drafter is not None else LookupDrafter(states, config)
        self.lengths = DraftLengths(
            states.max_num_reqs,
            config.num_tokens,
            adaptive=config.adaptive,
            overhead=config.step_overhead,
            saturated=config.saturated_cost,
            relative_cost=self.drafter.relative_cost,
        )
        self.stats = SpeculationStats.empty(config.num_tokens)
        self._guess = np.full(states.max_num_reqs, -1, np.int32)  # for the next token, −1 for none
        self._unguessed = np.zeros(
            states.max_num_reqs, np.int32
        )  # tokens since the last guess; a new row is guessed for at once

    def start(self, row: int) -> None:
        """A request was admitted to the row."""
        self.lengths.start(row)
        self._guess[row], self._unguessed[row] = -1, PROBE_EVERY

    def propose(self, rows: I32, room: I32) -> I32:
        """Drafts for these rows, at most room[i] and what is worth it: [n, D] padded with −1."""
        most = np.minimum(self.lengths.choose(rows), np.maximum(room, 0))
        probe = (self.drafter.relative_cost == 0) | (self._unguessed[rows] >= PROBE_EVERY)
        drafts = self.drafter.propose(rows, np.where(probe & (room > 0), np.maximum(most, 1), most))
        self._guess[rows] = drafts[:, 0]
        self._unguessed[rows] = np.where(drafts[:, 0] >= 0, 0, self._unguessed[rows] + 1)
        return np.where(np.arange(drafts.shape[1]) < most[:, None], drafts, np.int32(-1))

    def places(self, rows: I32, room: I32) -> I32:
        """Places to keep for what `propose` may give these rows after one step more, at most room[i]: [n]."""
        return np.minimum(self.lengths.most_next(rows), np.maximum(room, 0))

    def learn(self, plan: StepPlan, sampled: I32) -> None:
        """Take note of a step's result: sampled [B] or [B, D + 1] padded with −1."""
        sampled, rows = sampled.reshape(len(sampled), -1), plan.rows
        guessed = (self._guess[rows] >= 0).astype(np.int32)
        right = guessed * (self._guess[rows] == sampled[:, 0])
        if plan.draft_tokens is None:
            self.lengths.update(rows, guessed, right)
            return
        drafted = (plan.draft_tokens >= 0).sum(1, dtype=np.int32)
        accepted = (sampled >= 0).sum(1, dtype=np.int32) - 1
        accepted = np.minimum(np.maximum(accepted, 0), drafted)
        self.lengths.update(rows, np.maximum(drafted, guessed), np.where(drafted > 0, accepted, right))
        self.stats.add(drafted, accepted)
