"""Track the progress of each request: the only code that writes a row's token counts and tokens.

    0 ≤ num_computed_tokens ≤ num_tokens + num_placeholders,  prompt_len ≤ prefill_len ≤ num_tokens

native/batch/progress.h does the same for the native calls.
"""

from __future__ import annotations

from operator import setitem

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Bools
from foreword.batch.state.changes import Change
from foreword.errors import CapacityError


class Progress:
    """Writes the progress columns of `RequestStates`, which are described there.

    rewrites: int64 [R], grows with every change of a row's tokens or progress that is not part of a step. A mirror of
    the rows that commits steps itself is then out of date.
    """

    __slots__ = (
        "last_sampled_token", "num_accepted_tokens", "num_computed_tokens", "num_placeholders", "num_tokens",
        "prefill_len", "prompt_len", "rewrites", "token_ids",
    )  # fmt: skip

    def __init__(self, token_ids: I32, columns: dict[str, AnyArray]) -> None:
        self.token_ids = token_ids
        self.num_tokens: I32 = columns["num_tokens"]
        self.num_computed_tokens: I32 = columns["num_computed_tokens"]
        self.num_placeholders: I32 = columns["num_placeholders"]
        self.num_accepted_tokens: I32 = columns["num_accepted_tokens"]
        self.prompt_len: I32 = columns["prompt_len"]
        self.prefill_len: I32 = columns["prefill_len"]
        self.last_sampled_token: I32 = columns["last_sampled_token"]
        self.rewrites: I64 = np.zeros(len(token_ids), np.int64)

    def begin(self, row: int, prompt: I32, outputs: I32, num_computed: int) -> list[Change]:
        """Return the changes with which a request enters the row, which holds the padding of `ROWS`."""
        known = len(prompt) + len(outputs)
        return [
            (setitem, self.token_ids, (row, slice(len(prompt))), prompt),
            (setitem, self.token_ids, (row, slice(len(prompt), known)), outputs),
            (setitem, self.num_tokens, row, known),
            (setitem, self.prefill_len, row, known),
            (setitem, self.prompt_len, row, len(prompt)),
            (setitem, self.num_computed_tokens, row, num_computed),
            (setitem, self.last_sampled_token, row, outputs[-1] if len(outputs) else -1),
        ]

    def set_computed(self, row: int, num_computed: int) -> None:
        """Set num_computed_tokens to a scheduler's count, at most all known tokens but the last.

        A count from before the last samples were known includes drafts that were rejected since.
        """
        known = int(self.num_tokens[row]) + int(self.num_placeholders[row])
        computed = min(num_computed, known - 1)
        self.rewrites[row] += self.num_computed_tokens[row] != computed
        self.num_computed_tokens[row] = computed

    def write_tokens(self, req_id: str, row: int, start: int, tokens: I32) -> None:
        """Set token_ids[row, start : start + len(tokens)] = tokens. Raise CapacityError if they leave a gap or do not
        fit.
        """
        end = start + len(tokens)
        if start > self.num_tokens[row] or end > self.token_ids.shape[1]:
            raise CapacityError(
                f"request {req_id!r}: tokens {start} … {end - 1} do not follow its {self.num_tokens[row]} known "
                f"tokens, or do not fit max_model_len = {self.token_ids.shape[1]}",
                request=req_id,
                tensor="token_ids",
                expected=f"from {self.num_tokens[row]} or before, to {self.token_ids.shape[1]} at most",
                got=(start, end),
            )
        self.rewrites[row] += 1
        self.token_ids[row, start:end] = tokens
        if end > self.num_tokens[row]:
            self.num_tokens[row] = end
            if end > self.prompt_len[row]:
                self.last_sampled_token[row] = tokens[-1]

    def truncate(self, row: int, known: int) -> None:
        """Remove the tokens from ``known`` on: outputs that the scheduler has withdrawn."""
        if known < self.num_tokens[row]:
            self.rewrites[row] += 1
            self.num_tokens[row] = known
            last = self.token_ids[row, known - 1] if known > self.prompt_len[row] else -1
            self.last_sampled_token[row] = last

    def rewrite(self, row: int, tokens: I32, computed: int) -> list[Change]:
        """Return the changes after which a row has these known tokens, ``computed`` of them computed, and no step in
        flight.
        """
        known, prompt = len(tokens), int(self.prompt_len[row])
        return [
            (setitem, self.token_ids, (row, slice(known)), tokens),
            (setitem, self.num_tokens, row, known),
            (setitem, self.num_computed_tokens, row, computed),
            (setitem, self.num_placeholders, row, 0),
            (setitem, self.num_accepted_tokens, row, 1),
            (setitem, self.prefill_len, row, min(int(self.prefill_len[row]), known)),
            (setitem, self.last_sampled_token, row, tokens[-1] if known > prompt else -1),
            (setitem, self.rewrites, row, self.rewrites[row] + 1),
        ]

    def advance(self, rows: I32, computed: I32, samples: Bools, num_drafts: I32) -> list[Change]:
        """Return the changes that count steps in flight of the rows [n] as done, with all of their drafts accepted. For
        rows with ``samples``, num_placeholders += 1 + drafts.
        """
        placeholders = self.num_placeholders[rows] + samples * (1 + num_drafts)
        return [
            (setitem, self.num_computed_tokens, rows, computed),
            (setitem, self.num_placeholders, rows, placeholders),
        ]

    def commit(
        self, rows: I32, table: I32, counts: I32, samples: Bools, num_drafts: I32, computed: I32 | None
    ) -> list[Change]:
        """Return the changes of a committed step of the rows [n]: the first counts [n] entries of table [n, width] are
        sampled tokens.

        samples: bool [n], False for a prompt chunk, whose count is 0. computed: num_computed_tokens with all drafts
        accepted; None if `advance` has counted the step already.
        """
        accepted = np.maximum(counts, 1)
        rejected = (num_drafts + 1 - accepted) * samples
        known = self.num_tokens[rows]
        some = np.flatnonzero(counts)
        b, j = np.nonzero(np.arange(table.shape[1]) < counts[:, None])
        changes: list[Change] = [
            (setitem, self.token_ids, (rows[b], known[b] + j), table[b, j]),
            (setitem, self.num_tokens, rows, known + counts),
            (setitem, self.num_accepted_tokens, rows, accepted),
            (setitem, self.last_sampled_token, rows[some], table[some, counts[some] - 1]),
        ]
        if computed is not None:
            return [*changes, (setitem, self.num_computed_tokens, rows, computed - rejected)]
        placeholders = self.num_placeholders[rows] - samples * (1 + num_drafts)
        return [
            *changes,
            (setitem, self.num_computed_tokens, rows, self.num_computed_tokens[rows] - rejected),
            (setitem, self.num_placeholders, rows, placeholders),
        ]
