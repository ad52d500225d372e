"""The interface for code that follows the rows: logits processors with a state per row, the cache checker."""

from __future__ import annotations

from typing import Protocol


class RowObserver(Protocol):
    """Called by `RequestStates` for every row that a request enters, leaves, or exchanges with another."""

    def filled(self, row: int) -> None:
        """A request entered the row; its columns are complete."""

    def freed(self, row: int) -> None:
        """The row's request leaves; its id and columns are still there."""

    def exchanged(self, a: int, b: int) -> None:
        """The two rows changed places."""
