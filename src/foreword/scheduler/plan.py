"""The scheduler's decisions for one step."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.arrays import I32
from foreword.batch import BlockOps
from foreword.scheduler.ledger import Ledger
from foreword.scheduler.request import Request


@dataclass(slots=True, eq=False)
class StepPlan:
    """The plan of one step. It must not be changed; it is not frozen, for speed. Rows are in the order of the running
    list.

    rows, num_scheduled: int32 [B], for `prepare_inputs`; the counts include drafts.
    draft_tokens: int32 [B, D] padded with −1, or None when the step verifies nothing.
    prefilling: int32, the rows of this step that were still computing their prompt when it began. num_prompt_tokens:
    the number of tokens that they compute.
    block_ops: blocks to copy before the forward pass, for `prepare_inputs`.
    admitted: requests that were given a row. preempted: requests whose row was freed.
    """

    rows: I32
    num_scheduled: I32
    draft_tokens: I32 | None
    prefilling: I32
    num_prompt_tokens: int
    block_ops: BlockOps
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]
    ledger: Ledger

    @property
    def num_tokens(self) -> int:
        return self.ledger.num_tokens
