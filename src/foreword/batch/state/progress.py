"""How far each request is: the only code that writes a row's token counts and tokens.

    0 ≤ num_computed_tokens ≤ num_tokens + num_placeholders,  prompt_len ≤ prefill_len ≤ num_tokens

native/batch/progress.h is the same for the native calls.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Bools
from foreword.errors import CapacityError


class Progress:
    """Writes the progress columns of `RequestStates`, which are described there."""

    __slots__ = (
        "last_sampled_token",
        "num_accepted_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_tokens",
        "prefill_len",
        "prompt_len",
        "token_ids",
    )

    def __init__(self, token_ids: I32, columns: dict[str, AnyArray]) -> None:
        self.token_ids = token_ids
        self.num_tokens: I32 = columns["num_tokens"]
        self.num_computed_tokens: I32 = columns["num_computed_tokens"]
        self.num_placeholders: I32 = columns["num_placeholders"]
        self.num_accepted_tokens: I32 = columns["num_accepted_tokens"]
        self.prompt_len: I32 = columns["prompt_len"]
        self.prefill_len: I32 = columns["prefill_len"]
        self.last_sampled_token: I32 = columns["last_sampled_token"]

    def begin(self, row: int, prompt: I32, outputs: I32, num_computed: int) -> None:
        """A request enters the row."""
        known = len(prompt) + len(outputs)
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : known] = outputs
        self.num_tokens[row] = self.prefill_len[row] = known
        self.prompt_len[row] = len(prompt)
        self.num_computed_tokens[row] = num_computed
        self.last_sampled_token[row] = outputs[-1] if len(outputs) else -1

    def end(self, row: int) -> None:
        """The row's request leaves."""
        self.num_tokens[row] = self.num_computed_tokens[row] = self.num_placeholders[row] = 0
        self.prompt_len[row] = self.prefill_len[row] = 0
        self.num_accepted_tokens[row] = 1
        self.last_sampled_token[row] = -1

    def set_computed(self, row: int, num_computed: int) -> None:
        """Set num_computed_tokens to a scheduler's count, at most all known tokens but the last.

        A count from before the last samples were known includes drafts that were rejected since.
        """
        known = int(self.num_tokens[row]) + int(self.num_placeholders[row])
        self.num_computed_tokens[row] = min(num_computed, known - 1)

    def write_tokens(self, req_id: str, row: int, start: int, tokens: I32) -> None:
        """token_ids[row, start : start + len(tokens)] = tokens; CapacityError where they leave a gap or do not fit."""
        end = start + len(tokens)
        if start > self.num_tokens[row] or end > self.token_ids.shape[1]:
            raise CapacityError(
                f"request {req_id!r}: tokens {start} … {end - 1} do not follow its {self.num_tokens[row]} known "
                f"tokens, or do not fit max_model_len = {self.token_ids.shape[1]}"
            )
        self.token_ids[row, start:end] = tokens
        if end > self.num_tokens[row]:
            self.num_tokens[row] = end
            if end > self.prompt_len[row]:
                self.last_sampled_token[row] = tokens[-1]

    def truncate(self, row: int, known: int) -> None:
        """Drop the tokens from ``known`` on: outputs that the scheduler took back."""
        if known < self.num_tokens[row]:
            self.num_tokens[row] = known
            last = self.token_ids[row, known - 1] if known > self.prompt_len[row] else -1
            self.last_sampled_token[row] = last

    def advance(self, rows: I32, computed: I32, samples: Bools, num_drafts: I32) -> None:
        """Count steps in flight as done, all their drafts accepted: for the rows [n] and where ``samples``
        num_placeholders += 1 + drafts.
        """
        self.num_computed_tokens[rows] = computed
        self.num_placeholders[rows[samples]] += 1 + num_drafts[samples]

    def reach(self, rows: I32, computed: I32 | None) -> None:
        """A committed step of the rows [n]: num_computed_tokens, unless `advance` counted it, and nothing verified."""
        if computed is not None:
            self.num_computed_tokens[rows] = computed
        self.num_accepted_tokens[rows] = 1

    def accept(
        self, rows: I32, counts: I32, where: tuple[I64, I64], tokens: I32, num_drafts: I32, advanced: bool
    ) -> None:
        """After `reach`, the samples of the rows [n] that have some: counts [n] of them, ``tokens`` at ``where``."""
        self.num_computed_tokens[rows] -= num_drafts - np.maximum(counts - 1, 0)
        if advanced:
            self.num_placeholders[rows] -= 1 + num_drafts
        self.num_tokens[rows] += counts
        self.num_accepted_tokens[rows] = np.maximum(counts, 1)
        self.token_ids[where] = tokens
        some = counts > 0
        self.last_sampled_token[rows[some]] = tokens[np.cumsum(counts)[some] - 1]
