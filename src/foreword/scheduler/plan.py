"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.arrays import I32
from foreword.scheduler.ledger import Ledger
from foreword.scheduler.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Complete when made. Rows stand in the order of the running list.

    rows, num_scheduled: int32 [B], for `prepare_inputs`; the counts include drafts.
    draft_tokens: int32 [B, D] padded with −1, or None when the step verifies nothing.
    prefilling: int32, the rows of this step that were still computing their prompt when it began.
    block_copies: (sources, destinations) int32, to copy before the forward pass; all sources are read first.
    admitted: requests that got a row. preempted: requests that lost theirs.
    """

    rows: I32
    num_scheduled: I32
    draft_tokens: I32 | None
    prefilling: I32
    block_copies: tuple[I32, I32]
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]
    ledger: Ledger

    @property
    def num_tokens(self) -> int:
        return self.ledger.num_tokens
