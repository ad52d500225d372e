"""Map requests to rows."""

from __future__ import annotations

from collections.abc import Container
from operator import delitem, setitem

import numpy as np
import numpy.typing as npt

from foreword.arrays import Bools, Ints
from foreword.batch.state.changes import Change
from foreword.errors import CapacityError, RequestError


class Directory:
    """The map from request id to row, its inverse, and the free rows. The last free row serves the next request."""

    __slots__ = ("free", "ids", "rows")

    def __init__(self, max_num_reqs: int) -> None:
        self.rows: dict[str, int] = {}
        self.ids: npt.NDArray[np.object_] = np.full(max_num_reqs, None, object)
        self.free = list(range(max_num_reqs - 1, -1, -1))

    @property
    def native(self) -> tuple[dict[str, int], int, list[int]]:
        """Return the data for native code: the map, the address of the ids by row (str or None, [R]), and the free
        rows.
        """
        return self.rows, self.ids.ctypes.data, self.free

    def check_new(self, req_id: str, others: Container[str] = ()) -> None:
        """Raise RequestError for an id that is not a string, has a row, or is among ``others``.

        A subclass of str is refused: native code compares ids, which must not run Python code.
        """
        if type(req_id) is not str:
            raise RequestError(None, "req_id", req_id, "expected a string", "Name requests by strings, as str(id).")
        if req_id in self.rows or req_id in others:
            raise RequestError(req_id, "req_id", req_id, "is in use", "Remove that request first, or use another id.")

    def next_row(self, req_id: str, nth: int) -> int:
        """Return the row of the request that enters after ``nth`` others; CapacityError if no row is free."""
        if nth >= len(self.free):
            raise CapacityError(
                f"request {req_id!r}: all max_num_reqs = {len(self.ids)} rows are taken",
                request=req_id,
                tensor="max_num_reqs",
                expected=len(self.ids),
                got=len(self.ids) + 1,
            )
        return self.free[-1 - nth]

    def enter(self, row: int, req_id: str) -> list[Change]:
        """Return the changes with which a request enters its `next_row`. Requests must enter in the order of
        `next_row`.
        """
        return [(setitem, self.rows, req_id, row), (setitem, self.ids, row, req_id), (self.free.pop,)]

    def leave(self, row: int) -> list[Change]:
        """Return the changes that free the row."""
        return [(delitem, self.rows, self.ids[row]), (setitem, self.ids, row, None), (self.free.append, row)]

    def row_of(self, req_id: str) -> int:
        """Return the request's row; RequestError for an unknown id."""
        try:
            return self.rows[req_id]
        except (KeyError, TypeError):  # TypeError: the value cannot be a key
            raise RequestError(req_id, "req_id", req_id, "is unknown", "Admit it with add_request first.") from None

    def ids_of(self, rows: Ints) -> list[str]:
        """Return the ids of the requests in live rows; CapacityError for a free row."""
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.ids)):
            raise CapacityError(f"rows must be in [0, max_num_reqs = {len(self.ids)})")
        ids: list[str | None] = self.ids[rows].tolist()
        if None in ids:
            raise CapacityError(f"row {int(rows[ids.index(None)])} holds no request")
        return ids  # type: ignore[return-value]

    def exchange(self, a: int, b: int) -> None:
        """Exchange the contents of two rows. Call `refill` afterwards to update the list of free rows."""
        self.ids[a], self.ids[b] = self.ids[b], self.ids[a]
        for row in (a, b):
            if self.ids[row] is not None:
                self.rows[self.ids[row]] = row

    def refill(self, live: Bools) -> None:
        """Set the list of free rows from the live rows, in descending order."""
        self.free[:] = np.flatnonzero(~live)[::-1].tolist()
