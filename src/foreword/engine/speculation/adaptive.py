"""How many drafts are worth it, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class DraftLengths:
    """The number of drafts a row gets: twice as many after all were accepted, one more than were accepted otherwise.

    A row starts with ``most``; without adaption it stays there.
    """

    def __init__(self, max_num_reqs: int, most: int, *, adaptive: bool) -> None:
        self._most, self._adaptive = most, adaptive
        self._lengths = np.full(max_num_reqs, most, np.int32)

    def __getitem__(self, rows: Int32s) -> Int32s:
        return self._lengths[rows]

    def start(self, row: int) -> None:
        """The row has a new request."""
        self._lengths[row] = self._most

    def most_next(self, rows: Int32s) -> Int32s:
        """The largest numbers that one `update` can lead to."""
        return np.minimum(2 * self._lengths[rows], self._most)

    def update(self, rows: Int32s, drafted: Int32s, accepted: Int32s) -> None:
        """Learn from a step. Rows without drafts keep their length."""
        if self._adaptive:
            longer = np.where(accepted == drafted, 2 * drafted, accepted + 1)
            self._lengths[rows] = np.where(drafted > 0, np.minimum(longer, self._most), self._lengths[rows])


@dataclass(slots=True)
class SpeculationStats:
    """Counts since the engine started. num_accepted_at[j]: how often the j-th draft of a step was accepted."""

    num_steps: int
    num_drafted: int
    num_accepted: int
    num_drafted_at: npt.NDArray[np.int64]
    num_accepted_at: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, num_tokens: int) -> SpeculationStats:
        return cls(0, 0, 0, np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64))

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0 before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens that a verified request got in a step: the accepted drafts and one more."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    def add(self, drafted: Int32s, accepted: Int32s) -> None:
        """One entry a request of a step."""
        column = np.arange(len(self.num_drafted_at))
        self.num_steps += int(np.count_nonzero(drafted))
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        self.num_drafted_at += (column < drafted[:, None]).sum(0)
        self.num_accepted_at += (column < accepted[:, None]).sum(0)
