"""The grammar of one output, implemented with llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time
from typing import Self

from llguidance import LLMatcher

from foreword.arrays import I32
from foreword.sampling import GrammarStoppedError

SECONDS, SECONDS_PER_TOKEN = 0.5, 0.0003
"""The processor time that the outputs of one request may take in total and per token. An ambiguous grammar takes longer
with every token, and all requests of a step wait for it.
"""


class Budget:
    """The processor time that the masks of an output may still use."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = SECONDS


class Matcher:
    """Implements `foreword.sampling.Grammar`.

    compiled: the grammar before the first token; it is shared and never changed. end_ids: the model's end tokens, which
    are allowed where the output may end; they are not passed to llguidance, because it cannot roll them back. budget:
    shared with copies. A matcher without a budget is not limited; each of its copies gets a budget of its own.
    """

    __slots__ = ("_budget", "_compiled", "_end_ids", "_is_ended", "_matcher")

    def __init__(self, compiled: LLMatcher, end_ids: frozenset[int], budget: Budget | None = None) -> None:
        self._compiled, self._end_ids, self._budget = compiled, end_ids, budget
        self.reset()

    @property
    def is_terminated(self) -> bool:
        """Return whether the output has ended, or only an end token can follow."""
        return self._is_ended or bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_mask(self, words: I32) -> None:
        begin = self._begin()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(begin)

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.is_terminated or not self._accept(token):
                return count
        return len(token_ids)

    def _accept(self, token: int) -> bool:
        is_accepted: bool
        begin = self._begin()
        if token in self._end_ids:
            is_accepted = self._is_ended = self._matcher.is_accepting()
        else:
            is_accepted = self._matcher.try_consume_tokens([token]) == 1
        self._check(begin + SECONDS_PER_TOKEN)
        return is_accepted

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            begin = thread_time()  # this is done even if no time is left
            self._matcher.rollback(num_tokens)
            self._check(begin)

    def reset(self) -> None:
        """Start again with a new copy, because the old one may be damaged."""
        self._matcher = self._compiled.deep_copy()
        self._is_ended = False

    def copy(self) -> Self:
        return type(self)(self._compiled, self._end_ids, self._budget or Budget())

    def forced_tokens(self, limit: int) -> Sequence[int]:
        if self.is_terminated:
            return ()
        begin = self._begin()
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check(begin)
        return tokens[:limit]

    def _begin(self) -> float:
        """Return the thread's time. Raise GrammarStoppedError if the budget is used up."""
        if self._budget is not None and self._budget.seconds < 0:
            limit = f"{SECONDS:g} s and {SECONDS_PER_TOKEN * 1000:g} ms per token"
            raise GrammarStoppedError(f"the grammar takes more than {limit}: use one that is less ambiguous")
        return thread_time()

    def _check(self, begin: float) -> None:
        """Subtract the time since ``begin`` from the budget. Raise GrammarStoppedError if llguidance stopped, for
        example at one of its limits.
        """
        if self._budget is not None:
            self._budget.seconds -= thread_time() - begin
        if self._matcher.is_error():
            reason = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GrammarStoppedError(f"llguidance: {reason:.500}")
