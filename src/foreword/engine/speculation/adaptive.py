"""The number of drafts worth verifying, and statistics of their acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import F64, I32, I64

FORGET = 0.9  # factor of a row's earlier counts, at each step with drafts
START = 1.0, 2.0  # accepted, judged: a row begins with a rate of 1/2


class DraftLengths:
    """The number of drafts of each row, at most ``most``; always that if not ``adaptive``.

    Counted in tokens, a step of T tokens costs max(overhead + T, saturated · T): reading the weights plus a little per
    token, until arithmetic takes longer than reading. If a row's drafts are right at the rate a, its j-th draft adds
    a^j tokens and costs 1 + relative_cost · (overhead + B) / B, the drafter's share included. The chosen drafts
    maximise the yield of a step of B rows per cost

        (B + Σ a^j) / cost(B + Σ costs of the drafts)

    so that a small batch verifies uncertain drafts too, and a large one, where every token has its full cost, almost
    none. relative_cost: the cost of a step of the drafter relative to the target's, shared by the batch.
    """

    def __init__(
        self,
        max_num_reqs: int,
        most: int,
        *,
        adaptive: bool,
        overhead: float = 18.0,
        saturated: float = 2.8,
        relative_cost: float = 0.0,
    ) -> None:
        self._most, self._adaptive, self._relative_cost = most, adaptive, relative_cost
        self._overhead, self._saturated = overhead, saturated
        self._accepted = np.full(max_num_reqs, START[0])
        self._judged = np.full(max_num_reqs, START[1])
        self._lengths = np.full(max_num_reqs, most, np.int32)  # as last chosen

    def start(self, row: int) -> None:
        """A request was admitted to the row."""
        self._accepted[row], self._judged[row] = START
        self._lengths[row] = self._most

    def choose(self, rows: I32) -> I32:
        """The numbers of drafts for a step of these rows: int32 [n]."""
        if self._adaptive and len(rows):
            self._lengths[rows] = self._worth(self._accepted[rows] / self._judged[rows])
        return self._lengths[rows]

    def most_next(self, rows: I32) -> I32:
        """A likely upper bound of the next `choose`."""
        return np.minimum(2 * self._lengths[rows] + 1, self._most)

    def update(self, rows: I32, judged: I32, accepted: I32) -> None:
        """After a step: of judged[i] drafts the first accepted[i] were right. Rows without drafts keep their rate."""
        some = judged > 0
        rows, judged, accepted = rows[some], judged[some], accepted[some]
        self._accepted[rows] = FORGET * self._accepted[rows] + accepted
        # The drafts after a wrong one are not judged.
        self._judged[rows] = FORGET * self._judged[rows] + np.minimum(accepted + 1, judged)

    def _worth(self, rate: F64) -> I32:
        gain = rate[:, None] ** np.arange(1, self._most + 1)
        price = 1 + self._relative_cost * (self._overhead + len(rate)) / len(rate)
        best_first = np.argsort(-gain, axis=None, kind="stable")
        yielded = len(rate) + np.concatenate([[0.0], np.cumsum(gain.ravel()[best_first])])
        tokens = len(rate) + price * np.arange(len(yielded))
        count = int((yielded / np.maximum(self._overhead + tokens, self._saturated * tokens)).argmax())
        return np.bincount(best_first[:count] // self._most, minlength=len(rate)).astype(np.int32)


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
        """Accepted / drafted, 0 before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens per step of a request with drafts: the accepted drafts and one more."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    def add(self, drafted: I32, accepted: I32) -> None:
        """Add a step: one entry per request."""
        column = np.arange(len(self.num_drafted_at))
        self.num_steps += int(np.count_nonzero(drafted))
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        self.num_drafted_at += (column < drafted[:, None]).sum(0)
        self.num_accepted_at += (column < accepted[:, None]).sum(0)
