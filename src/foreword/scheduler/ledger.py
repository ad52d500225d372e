"""Why a request waits: one reason each, kept by the step that decided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "running", "new", "no_blocks", "token_budget", "max_num_seqs", "preemption", "behind", "prompt_of", "unknown"
]


@dataclass(frozen=True, slots=True)
class Reason:
    """``str(reason)`` is one line: the code and its numbers, such as ``no_blocks need=9 free=4``.

    running        it was scheduled in the last step
    new            no step has looked at it yet
    no_blocks      it needs more blocks than are free (beyond what running prompts and the watermark reserve)
    token_budget   the step's tokens went to others
    max_num_seqs   every place is taken
    preemption     a running request lost its blocks in this step, so nobody new was admitted
    behind         the request it names is first, and waits for the reason it names
    prompt_of      it shares the prompt that the request it names is computing
    unknown        no such request
    """

    code: Code
    details: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.code, *(f"{name}={value}" for name, value in self.details)])


def reason(code: Code, **details: int | str) -> Reason:
    return Reason(code, tuple(details.items()))


@dataclass(frozen=True, slots=True)
class Ledger:
    """The books of one step.

    num_tokens of token_budget were given out; num_running requests hold rows, num_waiting do not; num_free_blocks are
    left. blocked: why admission stopped at the request ``head``, None when nobody waited any more.
    """

    step: int
    num_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    head: str | None = None
    blocked: Reason | None = None

    def reason_for(self, request_id: str, num_tokens: int) -> Reason:
        """Why a waiting request that needs num_tokens was not admitted."""
        if self.blocked is None or self.head is None:
            return reason("new")
        if request_id == self.head or self.blocked.code in ("max_num_seqs", "preemption"):
            return self.blocked
        if self.blocked.code == "token_budget":
            return reason("token_budget", left=self.token_budget - self.num_tokens, need=num_tokens)
        return reason("behind", request=self.head, waits_for=f"({self.blocked})")
