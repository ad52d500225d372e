"""Speculation as the engine uses it: a drafter, how many drafts each row gets, and the counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from foreword.batch import RequestStates
from foreword.engine.speculation.adaptive import DraftLengths, SpeculationStats
from foreword.engine.speculation.config import SpeculationConfig
from foreword.engine.speculation.drafter import Drafter
from foreword.engine.speculation.lookup import LookupDrafter
from foreword.errors import ConfigError
from foreword.scheduler import StepPlan

Int32s = npt.NDArray[np.int32]


class Speculation:
    """Proposes drafts for rows, and learns from each step what they were worth."""

    def __init__(
        self,
        states: RequestStates,
        config: SpeculationConfig,
        drafter: Callable[[RequestStates], Drafter] | None = None,
    ) -> None:
        if drafter is None and config.method == "draft_model":
            raise ConfigError("speculation method='draft_model' needs a drafter that runs the model; see build_engine")
        self.drafter: Drafter = drafter(states) if drafter is not None else LookupDrafter(states, config)
        self.lengths = DraftLengths(states.max_num_reqs, config.num_tokens, adaptive=config.adaptive)
        self.stats = SpeculationStats.empty(config.num_tokens)

    def start(self, row: int) -> None:
        """A request was admitted to the row."""
        self.lengths.start(row)

    def propose(self, rows: Int32s, room: Int32s) -> Int32s:
        """Drafts for these rows, at most room[i] and the row's own length: [n, D] padded with −1."""
        return self.drafter.propose(rows, np.minimum(self.lengths[rows], np.maximum(room, 0)))

    def places(self, rows: Int32s, room: Int32s) -> Int32s:
        """Most drafts that `propose` can give these rows after one step more, at most room[i]: [n]."""
        return np.minimum(self.lengths.most_next(rows), np.maximum(room, 0))

    def learn(self, plan: StepPlan, sampled: Int32s) -> None:
        """Take note of a step's result: sampled [B] or [B, D + 1] padded with −1."""
        if plan.draft_tokens is None:
            return
        drafted = (plan.draft_tokens >= 0).sum(1, dtype=np.int32)
        accepted = (sampled.reshape(len(sampled), -1) >= 0).sum(1, dtype=np.int32) - 1
        accepted = np.minimum(np.maximum(accepted, 0), drafted)
        self.lengths.update(plan.rows, drafted, accepted)
        self.stats.add(drafted, accepted)
