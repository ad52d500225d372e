"""What proposes drafts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class Drafter(Protocol):
    """Guesses what follows the last known token of rows of the engine's `RequestStates`."""

    def propose(self, rows: Int32s, most: Int32s) -> Int32s:
        """Up to most[i] drafts for rows[i]: [n, D] padded with −1, D = max_num_draft_tokens."""
        ...
