"""Changes of the rows between two moments, for logits processors that keep a state per row."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.arrays import I32
from foreword.batch.state.request_states import RequestStates
from foreword.batch.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class AddedRow:
    """A request that was admitted. The token arrays are views of the states: read them before the next change."""

    row: int
    req_id: str
    params: SamplingParams | None
    prompt_token_ids: I32
    output_token_ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class BatchUpdate:
    """The net change of the rows. Apply it in this order, with ``old`` a processor's state before:

    removed: rows (old numbers) whose request was removed:        drop old[row]
    moved: (from, to) of live requests that changed rows:         new[to] = old[from], all at once
    added: requests admitted and still live:                      new[row] = …
    """

    added: tuple[AddedRow, ...]
    removed: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved)


_NEW, _FREE = -1, -2


class BatchUpdates:
    """Collects changes from its construction on; `take` returns them and starts again. Call `close` at the end.

        updates = BatchUpdates(states)
        …steps…
        if change := updates.take(): processor.update(change)

    A request admitted and removed between two calls is left out. States without observers have no extra cost.
    """

    __slots__ = ("_origin", "_removed", "_states")

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._origin: dict[int, int] = {}  # touched row → the row its request had at the last take, _NEW or _FREE
        self._removed: list[int] = []
        states.observers.append(self)

    def close(self) -> None:
        """Stop collecting."""
        self._states.observers.remove(self)

    def filled(self, row: int) -> None:
        self._origin[row] = _NEW

    def freed(self, row: int) -> None:
        origin = self._origin.get(row, row)
        if origin >= 0:
            self._removed.append(origin)
        self._origin[row] = _FREE

    def exchanged(self, a: int, b: int) -> None:
        self._origin[a], self._origin[b] = self._now(b, a), self._now(a, b)

    def _now(self, row: int, holder: int) -> int:
        """Return the origin of the request that was in ``row`` and is now in ``holder``."""
        return self._origin.get(row, row if self._states.live[holder] else _FREE)

    def take(self) -> BatchUpdate:
        """Return the changes since the last call."""
        states = self._states
        touched = sorted(self._origin.items())
        update = BatchUpdate(
            tuple(self._added(row) for row, origin in touched if origin == _NEW),
            tuple(sorted(self._removed)),
            tuple((origin, row) for row, origin in touched if origin >= 0 and origin != row),
        )
        self._origin, self._removed = {}, []
        assert all(states.live[a.row] for a in update.added)
        return update

    def take_all(self) -> BatchUpdate:
        """Return the change for a processor that may have missed some: every row is removed, then the live rows are
        added.
        """
        rows = self._states.live.nonzero()[0].tolist()
        update = BatchUpdate(tuple(map(self._added, rows)), tuple(range(len(self._states.live))), ())
        self._origin, self._removed = {}, []
        return update

    def _added(self, row: int) -> AddedRow:
        s = self._states
        prompt, known = int(s.prompt_len[row]), int(s.num_tokens[row])
        tokens = s.token_ids[row]
        return AddedRow(row, s.req_id_of(row), s.sampling.params.get(row), tokens[:prompt], tokens[prompt:known])
