"""Draft tokens for the next step, by row."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32


class Drafts:
    """The drafts that the next step verifies after the last known token of each row.

    version: grows with every proposal. may_verify: whether a running row may have drafts.
    """

    def __init__(self, max_num_reqs: int, max_num_draft_tokens: int) -> None:
        self.version = 0
        self.may_verify = False
        self._token_ids = np.full((max_num_reqs, max_num_draft_tokens), -1, np.int32)
        self._count = np.zeros(max_num_reqs, np.int32)
        self._place = np.arange(max_num_draft_tokens)

    def propose(self, rows: I32, drafts: I32) -> None:
        """Set the drafts of these rows, [n, ≤ D] padded with −1. They follow the last known token of each row."""
        self._token_ids[rows] = -1
        self._token_ids[rows, : drafts.shape[1]] = drafts
        self._count[rows] = (drafts >= 0).sum(1)
        self.may_verify = True
        self.version += 1

    def reserve(self, rows: I32, num_slots: I32) -> None:
        """Set num_slots[i] drafts after the tokens in flight of rows[i]; `Scheduler.resolve` fills in their ids."""
        self.propose(rows, np.where(self._place < num_slots[:, None], 0, -1).astype(np.int32))

    def count(self, rows: I32) -> I32:
        """Return the number of drafts of each row."""
        return self._count[rows]

    def count_of_running(self, rows: I32) -> I32 | None:
        """Return the number of drafts of each running row, None if it is known that no row has any."""
        if not self.may_verify:
            return None
        count = self._count[rows]
        self.may_verify = bool(count.any())
        return count

    def discard(self, rows: I32 | int) -> None:
        """Remove the drafts of one or more rows."""
        self._count[rows] = 0

    def fitting(self, rows: I32, most: I32) -> I32 | None:
        """Return the first most[i] drafts of each row, [len(rows), D] padded with −1; None if no row has any."""
        if not self.may_verify or not self._count[rows].any():
            return None
        return self._first(rows, most)

    def filled(self, rows: I32, slots: I32) -> tuple[I32, I32 | None]:
        """Return how many of slots[i] reserved drafts have been proposed, and these drafts; None if there are none."""
        count = np.minimum(slots, self._count[rows])
        return count, self._first(rows, count) if count.any() else None

    def clear(self) -> None:
        """Remove the drafts of every row."""
        self._count[:] = 0

    def _first(self, rows: I32, most: I32) -> I32:
        return np.where(self._place < most[:, None], self._token_ids[rows], np.int32(-1))
