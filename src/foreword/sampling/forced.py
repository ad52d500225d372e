"""Given outputs: a grammar that allows one token at each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from foreword.arrays import I32


@dataclass(slots=True)
class GivenTokens:
    """Implement `foreword.sampling.Grammar`: these tokens must come first, and any may follow. num_accepted: tokens so
    far.
    """

    tokens: Sequence[int]
    num_accepted: int = 0

    @property
    def is_terminated(self) -> bool:
        return False

    def fill_mask(self, words: I32) -> None:
        if self.num_accepted >= len(self.tokens):
            words[:] = -1
            return
        token = self.tokens[self.num_accepted]
        words[:] = 0
        words.view("u4")[token // 32] = np.uint32(1 << token % 32)

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.num_accepted < len(self.tokens) and token != self.tokens[self.num_accepted]:
                return count
            self.num_accepted += 1
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens

    def reset(self) -> None:
        self.num_accepted = 0

    def copy(self) -> Self:
        return type(self)(self.tokens)

    def forced_tokens(self, limit: int) -> Sequence[int]:
        return self.tokens[self.num_accepted : self.num_accepted + limit]
