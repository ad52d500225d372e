"""The grammar of one output, on llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from llguidance import LLMatcher

from foreword.arrays import I32
from foreword.sampling import GrammarStoppedError


class Matcher:
    """Implements `foreword.sampling.Grammar`.

    compiled: the grammar with no token accepted, shared and never changed. end_ids: the model's end tokens, allowed
    where the output may end; they are not passed to llguidance, which does not take them back.
    """

    __slots__ = ("_compiled", "_end_ids", "_is_ended", "_matcher")

    def __init__(self, compiled: LLMatcher, end_ids: frozenset[int]) -> None:
        self._compiled, self._end_ids = compiled, end_ids
        self.reset()

    @property
    def is_terminated(self) -> bool:
        """Also where only an end token could follow."""
        return self._is_ended or bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_mask(self, words: I32) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.is_terminated or not self._accept(token):
                return count
        return len(token_ids)

    def _accept(self, token: int) -> bool:
        is_accepted: bool
        if token in self._end_ids:
            is_accepted = self._is_ended = self._matcher.is_accepting()
        else:
            is_accepted = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return is_accepted

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def reset(self) -> None:
        """A new copy: the old one may be damaged."""
        self._matcher = self._compiled.deep_copy()
        self._is_ended = False

    def copy(self) -> Self:
        return type(self)(self._compiled, self._end_ids)

    def forced_tokens(self, limit: int) -> Sequence[int]:
        if self.is_terminated:
            return ()
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return tokens[:limit]

    def _check(self) -> None:
        """GrammarStoppedError if llguidance gave up, such as at one of its limits."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GrammarStoppedError(f"llguidance: {reason:.500}")
