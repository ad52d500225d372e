"""What proposes drafts."""

from __future__ import annotations

from typing import Protocol

from foreword.arrays import I32


class Drafter(Protocol):
    """Guesses what follows the last known token of rows of the engine's `RequestStates`.

    relative_cost: what guessing one token for a batch costs in terms of the target's step; 0 where that is negligible.
    """

    relative_cost: float

    def propose(self, rows: I32, most: I32) -> I32:
        """Up to most[i] drafts for rows[i]: [n, D] padded with −1, D = max_num_draft_tokens."""
        ...
