"""The rows of a target whose requests left, for drafters that keep something of each."""

from __future__ import annotations

from collections.abc import Iterator

from foreword.batch import RequestStates


class GoneRows:
    """Collects rows of ``states`` that a request left, or that changed places, from its construction on."""

    def __init__(self, states: RequestStates) -> None:
        self._rows: list[int] = []
        states.observers.append(self)

    def filled(self, row: int) -> None:
        """See `RowObserver`."""

    def freed(self, row: int) -> None:
        """See `RowObserver`."""
        self._rows.append(row)

    def exchanged(self, a: int, b: int) -> None:
        """See `RowObserver`."""
        self._rows += (a, b)

    def take(self) -> Iterator[int]:
        """Yield the rows, some maybe more than once. One that the caller did not finish with is yielded again."""
        while self._rows:
            yield self._rows[0]
            del self._rows[0]
