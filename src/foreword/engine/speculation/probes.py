"""When drafts are only compared with the sampled tokens, of a drafter that costs time."""

from __future__ import annotations

import math

PROBE_COST = 0.005  # share of the time of steps for drafts that are only compared
PROBE_EVERY = 16  # steps from the first of them to the next, at least
PROBED = 4  # steps in a row with them, of a drafter that has to follow the target first
FORGET_SECONDS = 0.9  # factor of the earlier time of a step, at each step


class Probes:
    """Steps in which every row gets a draft, to notice when drafts become right: ``num_probed`` in a row, then none
    until these have taken `PROBE_COST` of the time, by the sizes of the models and by the clock.

    relative_cost: see `Drafter`. A drafter that costs nothing makes drafts in every step.
    """

    def __init__(self, relative_cost: float, *, follows: bool) -> None:
        self.num_steps = 0
        self.num_probed = PROBED if follows else 1
        self._is_free = relative_cost <= 0
        self.period = max(PROBE_EVERY, math.ceil(self.num_probed * relative_cost / PROBE_COST))
        self._first, self._spent, self._step_seconds = 0, 0.0, 0.0

    @property
    def are_due(self) -> bool:
        """Return whether each row gets a draft in this step."""
        return self._is_free or 0 <= self.num_steps - self._first < self.num_probed

    def measure(self, seconds: float, drafting: float) -> None:
        """Learn from the seconds of a step, and from those of the drafter besides."""
        last = self._step_seconds or seconds
        self._step_seconds = FORGET_SECONDS * last + (1 - FORGET_SECONDS) * seconds
        if self.num_steps < self._first:
            return
        self._spent += drafting
        if self.num_steps >= self._first + self.num_probed - 1:
            allowed = PROBE_COST * self._step_seconds
            self._first += max(self.period, math.ceil(self._spent / allowed) if allowed > 0 else 0)
            self._spent = 0.0
