"""The reason why each request waits, recorded by the step that decided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "running", "new", "loading", "no_blocks", "no_states", "token_budget", "max_num_seqs", "preemption", "behind",
    "prompt_of", "share", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reason:
    """``str(reason)`` is one line: the code and its numbers, such as ``no_blocks need=9 free=4``.

    running        it was scheduled in the last step
    new            no step has considered it yet
    loading        the beginning of its prompt is read from outside the pool: from disk, or from the host's memory
    no_blocks      it needs more blocks than are free (beyond what running prompts and the watermark reserve)
    no_states      it needs more slots for the states of its recurrent layers than are free
    token_budget   other requests took the step's tokens
    max_num_seqs   max_num_seqs requests are running
    preemption     a running request was preempted in this step, so no request was admitted
    behind         the named request is first, and waits for the named reason
    prompt_of      the named request is computing the same prompt, or the beginning of it
    share          its owner has used its share, so about this many tokens of others are computed first
    unknown        the id is unknown
    """

    code: Code
    details: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.code, *(f"{name}={value}" for name, value in self.details)])


def reason(code: Code, **details: int | str) -> Reason:
    """Return the reason with this code and these details."""
    return Reason(code, tuple(details.items()))


@dataclass(slots=True)
class Ledger:
    """The record of one step. It must not be changed; it is not frozen, for speed.

    num_tokens of the token_budget were scheduled; num_running requests have rows and num_waiting do not;
    num_free_blocks are left. blocked: why admission stopped at the request ``head``; None if the queue was emptied.
    """

    num_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    head: str | None = None
    blocked: Reason | None = None

    def reason_for(self, request_id: str, num_tokens: int) -> Reason:
        """Return why a waiting request that needs num_tokens was not admitted."""
        if self.blocked is None or self.head is None:
            return reason("new")
        if request_id == self.head or self.blocked.code in ("max_num_seqs", "preemption"):
            return self.blocked
        if self.blocked.code == "token_budget":
            return reason("token_budget", left=self.token_budget - self.num_tokens, need=num_tokens)
        return reason("behind", request=self.head, waits_for=f"({self.blocked})")
