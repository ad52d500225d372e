"""The number of drafts worth verifying, and statistics of their acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F64, I32, I64, Bools
from foreword.engine.speculation.costs import Credit, StepCosts
from foreword.native import available, native

FORGET = 0.9  # factor of a row's earlier counts, at each step with drafts
FORGET_ALL = 0.99  # the factor of the counts of all rows
JUDGED = 5.0  # drafts that the rate of a row begins with
JUDGED_AT_FIRST = 10.0  # and that of all rows
WORTH = 1.2  # the least yield per cost with drafts, relative to that without
LEAST_RATE = 1 - 1 / WORTH  # drafts that are right more rarely have no such yield, even if they cost nothing


class DraftLengths:
    """The number of drafts of each row, at most ``most``; always that if not ``adaptive``.

    If a row's drafts are right at the rate a, its j-th draft adds a^j tokens. The n chosen drafts maximise the yield of
    a step of B rows per cost

        (B + Σ a^j) / (cost(B + n) / cost(B) + relative_cost · n / B)        cost: of `StepCosts`

    so that a small batch verifies uncertain drafts too, and a large one, where every token has its full cost, almost
    none. If all of them are wrong, they cost no more than the `Credit`. relative_cost: the cost of a step of the
    drafter relative to the target's, shared by the batch.

    A row has a rate for each kind of drafts. It begins with the rate of recent drafts of the kind in all rows, which
    begins with ``rates``.
    """

    def __init__(
        self,
        max_num_reqs: int,
        most: int,
        *,
        adaptive: bool,
        costs: StepCosts | None = None,
        relative_cost: float = 0.0,
        rates: Sequence[float] = (0.5,),
    ) -> None:
        self._most, self._adaptive, self._relative_cost = most, adaptive, relative_cost
        self.costs = costs or StepCosts(max_num_reqs * (most + 1))
        self.credit = Credit()
        self._all = JUDGED_AT_FIRST * np.array([rates, np.ones(len(rates))])  # accepted, judged
        self._accepted = np.tile(JUDGED * np.array(rates), (max_num_reqs, 1))
        self._judged = np.full((max_num_reqs, len(rates)), JUDGED)
        self._lengths = np.full(max_num_reqs, most, np.int32)  # as last chosen
        self._place = np.arange(1, most + 1)
        self._largest_cost = np.log(np.arange(1, most + 2) / WORTH)  # that j right drafts per row are worth

    def start(self, row: int) -> None:
        """Begin with a request that was admitted to the row."""
        self._accepted[row], self._judged[row] = JUDGED * self._all[0] / self._all[1], JUDGED
        self._lengths[row] = self._most
        self.credit.start()

    def can_gain(self, num_rows: int) -> bool:
        """Return whether drafts in a step of so many rows would be worth verifying if all of them were right."""
        if not self._adaptive:
            return True
        cost = self.costs.logarithms(num_rows, num_rows * self._most, every=num_rows)
        return bool((cost <= self._largest_cost).any())

    def choose(self, rows: I32, offered: I32, kinds: I32) -> I32:
        """Return the numbers of drafts for a step of these rows, int32 [n]: at most offered[i] of the kind kinds[i]."""
        lengths = np.minimum(offered, self._most)
        if self._adaptive and self.credit.steps <= 0:
            lengths = np.zeros_like(lengths)
        elif self._adaptive and len(rows):
            rate = self._accepted[rows, kinds] / self._judged[rows, kinds]
            lengths = self._worth(rate, lengths) if rate.max() >= LEAST_RATE else np.zeros_like(lengths)
        self._lengths[rows] = lengths
        return lengths

    def are_hopeless(self, rows: I32, kinds: I32) -> Bools:
        """Return for each row whether its drafts are right so rarely that `choose` wants none, whatever they cost."""
        rate = self._accepted[rows, kinds] / self._judged[rows, kinds]
        hopeless: Bools = (rate < LEAST_RATE) & self._adaptive
        return hopeless

    def choose_none(self, rows: I32) -> None:
        """Note that a step of these rows has no drafts."""
        self._lengths[rows] = 0

    def most_next(self, rows: I32) -> I32:
        """Return a likely upper bound of the next `choose`."""
        return np.minimum(2 * self._lengths[rows] + 1, self._most)

    def update(self, rows: I32, kinds: I32, judged: I32, accepted: I32) -> None:
        """Update the rates after a step: of judged[i] drafts the first accepted[i] were right. Rows without drafts keep
        their rate.
        """
        some = judged > 0
        rows, kinds, judged, accepted = rows[some], kinds[some], judged[some], accepted[some]
        judged = np.minimum(accepted + 1, judged)  # the drafts after a wrong one are not judged
        self._accepted[rows, kinds] = FORGET * self._accepted[rows, kinds] + accepted
        self._judged[rows, kinds] = FORGET * self._judged[rows, kinds] + judged
        new = np.stack([np.bincount(kinds, counts, self._all.shape[1]) for counts in (accepted, judged)])
        self._all[:] = np.where(new[1] > 0, FORGET_ALL * self._all, self._all) + new

    def gain(self, num_rows: int, num_drafted: int, num_accepted: int) -> float:
        """Return what so many drafts gained in a step of so many rows, in steps without drafts."""
        cost = self.costs.ratio(num_rows, num_drafted) - 1 + self._relative_cost * num_drafted / num_rows
        return num_accepted / num_rows - cost

    def native_policy(self, stats: SpeculationStats) -> native.DraftPolicy | None:
        """Return native code that chooses the drafts of rows, and that updates these rates and the counts by place of
        ``stats``; None where it is not built, or if the number of drafts does not adapt.
        """
        if not (self._adaptive and available()):
            return None
        arrays = (self._accepted, self._judged, self._all, self._lengths, self.costs.log_cost)
        counts = stats.num_drafted_at, stats.num_accepted_at
        return native.DraftPolicy(*arrays, *counts, WORTH, self._relative_cost, FORGET, FORGET_ALL)

    def _worth(self, rate: F64, offered: I32) -> I32:
        n = len(rate)
        gain = np.where(self._place <= offered[:, None], rate[:, None] ** self._place, 0.0)
        best_first = np.argsort(-gain, axis=None, kind="stable")[: int(offered.sum())]
        yielded = n + np.concatenate([[0.0], np.cumsum(gain.ravel()[best_first])])
        cost = self.costs.relative(n, len(best_first))
        if self._relative_cost:
            cost = cost + self._relative_cost * np.arange(len(cost)) / n
        worth = np.where(cost - 1 <= self.credit.steps, yielded / cost, 0.0)
        count = int(worth.argmax())
        if worth[count] < WORTH * n:
            return np.zeros(n, np.int32)
        return np.bincount(best_first[:count] // self._most, minlength=n).astype(np.int32)


@dataclass(slots=True)
class SpeculationStats:
    """Counts since the engine started. num_accepted_at[j]: accepted drafts at place j of their step."""

    num_steps: int
    num_drafted: int
    num_accepted: int
    num_drafted_at: I64
    num_accepted_at: I64

    @classmethod
    def empty(cls, num_tokens: int) -> SpeculationStats:
        return cls(0, 0, 0, np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64))

    @property
    def acceptance_rate(self) -> float:
        """The ratio of accepted to computed drafts, 0 before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        """The number of tokens per step of a request with drafts: the accepted drafts and one more."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    def count(self, num_steps: int, num_drafted: int, num_accepted: int) -> None:
        """Add the drafts of a step, in which so many requests had drafts."""
        self.num_steps += num_steps
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def add_places(self, drafted: I32, accepted: I32) -> None:
        """Add the drafts of a step to the counts by place: one entry per request."""
        column = np.arange(len(self.num_drafted_at))
        self.num_drafted_at += (column < drafted[:, None]).sum(0)
        self.num_accepted_at += (column < accepted[:, None]).sum(0)
