"""The inputs of logits processors: values by state row, and the rows of logits of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from foreword.arrays import I32, Bools, Ints
from foreword.batch import AddedRow, BatchUpdate, InputBatch, RequestStates

T = TypeVar("T")


class RowValues(Generic[T]):
    """A value for some of the state rows, that moves and ends with the request of its row.

    mask: bool [R], True where a row has a value.
    """

    __slots__ = ("_values", "mask")

    def __init__(self, max_num_reqs: int) -> None:
        self.mask: Bools = np.zeros(max_num_reqs, np.bool_)
        self._values: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> T:
        return self._values[row]

    def update(self, change: BatchUpdate, value_of: Callable[[AddedRow], T | None]) -> None:
        """Follow a change of the rows. value_of: the value of a new request; None for none."""
        for row in change.removed:
            self._set(row, None)
        moved = [(to, self._values.get(origin)) for origin, to in change.moved]
        for origin, _ in change.moved:
            self._set(origin, None)
        for to, value in moved:
            self._set(to, value)
        for added in change.added:
            self._set(added.row, value_of(added))

    def _set(self, row: int, value: T | None) -> None:
        if value is None:
            self._values.pop(row, None)
        else:
            self._values[row] = value
        self.mask[row] = value is not None


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """N rows of logits. From row i the token after the known tokens of request rows[i] and some drafts is chosen.

    rows: int32 [N] state rows. The drafts that precede the token are
    draft_token_ids[first_draft[i] : first_draft[i] + num_drafts[i]].
    """

    states: RequestStates
    rows: I32
    draft_token_ids: I32
    first_draft: I32
    num_drafts: I32

    @classmethod
    def of(cls, batch: InputBatch, indices: Ints) -> LogitRows:
        """Return the rows with these indices, ascending, among the batch's logits."""
        b = np.searchsorted(batch.cu_num_logits, indices, side="right") - 1
        return cls(
            batch.states,
            batch.expanded_idx_mapping[indices],
            batch.draft_token_ids,
            batch.cu_num_draft_tokens[b],
            batch.expanded_local_pos[indices],
        )

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Ints) -> LogitRows:
        """Return some of the rows."""
        return LogitRows(
            self.states, self.rows[indices], self.draft_token_ids, self.first_draft[indices], self.num_drafts[indices]
        )

    def prompt_token_ids(self, i: int) -> I32:
        """Return the token ids of the prompt, without positions that are embeddings."""
        states, row = self.states, self.rows[i]
        prompt: I32 = states.token_ids[row, : states.prompt_len[row]]
        mask = states.extras.is_embedding
        return prompt if mask is None else prompt[~mask[row, : len(prompt)]]

    def output_token_ids(self, i: int) -> I32:
        """Return the outputs known, then the drafts that precede the token."""
        states, row, start = self.states, self.rows[i], self.first_draft[i]
        output: I32 = states.token_ids[row, states.prompt_len[row] : states.num_tokens[row]]
        if not self.num_drafts[i]:
            return output
        return np.concatenate([output, self.draft_token_ids[start : start + self.num_drafts[i]]])
