"""Drafts that grammars leave no choice of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.sampling import Grammar
from foreword.scheduler import Scheduler, StepPlan


class ForcedTokens:
    """Proposes the tokens that have to follow as drafts, so that they cost no step of their own.

    grammars: by state row. most: drafts of a row in a step. forced_tokens: of grammars with limits, int32 [n, width].
    """

    def __init__(
        self,
        states: RequestStates,
        grammars: Mapping[int, Grammar],
        most: int,
        forced_tokens: Callable[[Sequence[Grammar], Sequence[int], int], I32],
    ) -> None:
        self._states, self._grammars, self._most, self._forced_tokens = states, grammars, most, forced_tokens
        self.is_forced = np.zeros(states.max_num_reqs, np.bool_)  # by row: whether its drafts are from here

    def propose_next(self, scheduler: Scheduler, rows: I32) -> I32:
        """Propose drafts for the next step of rows that continue. Returns the rows that have none from here."""
        self.is_forced[rows] = False
        if not self._grammars or not self._most:
            return rows
        asked = rows[np.isin(rows, list(self._grammars))]
        room = scheduler.running.max_len[asked] - self._states.num_tokens[asked] - 1
        limits = np.clip(room, 0, self._most).tolist()
        grammars = [self._grammars[row] for row in asked.tolist()]
        drafts = self._forced_tokens(grammars, limits, self._states.max_num_draft_tokens)
        some = drafts[:, 0] >= 0
        scheduler.drafts.propose(asked[some], drafts[some])
        self.is_forced[asked[some]] = True
        return rows[~self.is_forced[rows]]

    def others(self, rows: I32, num_drafts: I32) -> I32:
        """Return the numbers of drafts of rows, 0 where they are from here."""
        return np.where(self.is_forced[rows], np.int32(0), num_drafts)

    def reserve_draft_slots(self, scheduler: Scheduler, in_flight: StepPlan) -> None:
        """Reserve slots, beside those of a drafter, for the tokens that the samples in flight may force."""
        if self._grammars and self._most:
            states = self._states
            rows = in_flight.rows[np.isin(in_flight.rows, list(self._grammars))]
            rows = rows[states.num_placeholders[rows] > 0]
            room = scheduler.running.max_len[rows] - states.num_tokens[rows] - states.num_placeholders[rows] - 1
            scheduler.drafts.reserve(rows, np.clip(room, 0, self._most))
