"""The protocol of drafters."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from foreword.arrays import I32


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that may follow the last known token of rows of the engine's `RequestStates`.

    relative_cost: the cost of drafting one token for a batch, relative to a step of the target; 0 where negligible.
    """

    relative_cost: float

    def propose(self, rows: I32, most: I32) -> I32:
        """Up to most[i] drafts for rows[i]: [n, k] padded with −1, where max(most) ≤ k ≤ max_num_draft_tokens."""
