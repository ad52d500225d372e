"""The thinking: a first, free part of the output, before the part with a structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreword.arrays import I32
from foreword.sampling import Grammar


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """The end of the thinking. text: recognised as soon as it is complete, in any tokenization. tokens: forced when the
    budget of tokens (None: no limit) is used up. words: the mask during the thinking. token_bytes: the bytes of every
    token. start: the token that begins the thinking; an output that begins with another token has none. None: every
    output begins inside it.
    """

    text: bytes
    tokens: Sequence[int]
    budget: int | None
    words: I32
    token_bytes: Sequence[bytes]
    start: int | None


@dataclass(slots=True)
class Thinking:
    """Implements `foreword.sampling.Grammar`: free tokens, the end of the thinking, then ``grammar`` (None: free).

    The token that completes the end belongs completely to the thinking. tokens: the tokens of the thinking, with its
    start. num_after: the number of tokens after it.
    """

    end: ThinkingEnd
    grammar: Grammar | None
    tokens: list[int] = field(default_factory=list)
    num_after: int = 0
    is_over: bool = False

    @property
    def is_terminated(self) -> bool:
        return self.is_over and self.grammar is not None and self.grammar.is_terminated

    @property
    def _may_begin(self) -> bool:
        """Return whether the next token is the first one and decides if there is thinking."""
        return self.end.start is not None and not self.tokens and not self.is_over

    def fill_mask(self, words: I32) -> None:
        if self.is_over or self._may_begin:
            if self.grammar is not None:
                self.grammar.fill_mask(words)
            else:
                words[:] = -1
            if self._may_begin and self.end.start is not None:
                _allow(words, self.end.start)
        elif forced := self._forced():
            words[:] = 0
            _allow(words, forced[0])
        else:
            words[:] = self.end.words

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self._accept(token):
                return count
        return len(token_ids)

    def _accept(self, token: int) -> bool:
        begins = self._may_begin and token == self.end.start
        if self.is_over or (self._may_begin and not begins):
            is_accepted = self.grammar is None or self.grammar.accept([token]) == 1
            self.num_after += is_accepted
            self.is_over |= is_accepted
            return is_accepted
        forced = self._forced()
        is_allowed = forced[0] == token if forced else bool(self.end.words[token // 32] >> token % 32 & 1)
        if not begins and not is_allowed:
            return False
        self.tokens.append(token)
        last = self.tokens[-len(self.end.text) :]
        self.is_over = self.end.text in b"".join([self.end.token_bytes[token] for token in last])
        return True

    def roll_back(self, num_tokens: int) -> None:
        after = min(num_tokens, self.num_after)
        if self.grammar is not None:
            self.grammar.roll_back(after)
        self.num_after -= after
        if num_tokens > after:
            del self.tokens[len(self.tokens) - (num_tokens - after) :]
        if not self.num_after and (num_tokens > after or not self.tokens):
            self.is_over = False

    def reset(self) -> None:
        if self.grammar is not None:
            self.grammar.reset()
        self.tokens.clear()
        self.num_after, self.is_over = 0, False

    def copy(self) -> Self:
        return type(self)(self.end, None if self.grammar is None else self.grammar.copy())

    def forced_tokens(self, limit: int) -> Sequence[int]:
        if self.is_over:
            return () if self.grammar is None else self.grammar.forced_tokens(limit)
        forced = self._forced()
        if forced and self.grammar is not None:
            forced = [*forced, *self.grammar.forced_tokens(limit)]
        return forced[:limit]

    def _forced(self) -> Sequence[int]:
        """Return the tokens of the end that must follow now; none while the budget is not used up."""
        used = len(self.tokens) - (self.end.start is not None)
        if self.end.budget is None or used < self.end.budget:
            return ()
        return self.end.tokens[used - self.end.budget :]


def _allow(words: I32, token: int) -> None:
    words.view("u4")[token // 32] |= np.uint32(1 << token % 32)
