"""Drafters for tests."""

from collections.abc import Callable, Sequence

import numpy as np

from foreword.batch import RequestStates


class Recalled:
    """Knows what follows. texts: prompts with their outputs. is_wrong: by position, whether its draft is made wrong."""

    relative_cost = 0.0

    def __init__(
        self,
        texts: Sequence[list[int]],
        states: RequestStates,
        is_wrong: Callable[[int], bool] = lambda position: position % 4 == 0,
    ) -> None:
        self.texts, self.states, self.is_wrong = texts, states, is_wrong

    def propose(self, rows, most):
        drafts = np.full((len(rows), self.states.max_num_draft_tokens), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            known = self.states.token_ids[row, : self.states.num_tokens[row]].tolist()
            text = next((text for text in self.texts if text[: len(known)] == known), known)
            for j, token in enumerate(text[len(known) : len(known) + int(most[i])]):
                drafts[i, j] = (token + 1) % self.states.vocab_size if self.is_wrong(len(known) + j) else token
        return drafts
