"""What changed in the rows since somebody last asked, for logits processors that keep a state of their own by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foreword.arrays import I32
from foreword.batch.values.sampling_params import SamplingParams

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates


class RowWatcher(Protocol):
    """Told by `RequestStates` of every row that is filled, about to be freed, or exchanged with another."""

    def filled(self, row: int) -> None: ...
    def freed(self, row: int) -> None: ...
    def exchanged(self, a: int, b: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class AddedRow:
    """A request that came. The token arrays are views of the states: read them before the next change."""

    row: int
    req_id: str
    params: SamplingParams | None
    prompt_token_ids: I32
    output_token_ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class BatchUpdate:
    """The net change of the rows. Apply it in this order, with ``old`` a processor's state before:

    removed: rows (old numbers) whose request is gone:            forget old[row]
    moved: (from, to) of requests that live on in another row:    new[to] = old[from], all at once
    added: requests that came, and stayed:                        new[row] = …
    """

    added: tuple[AddedRow, ...]
    removed: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved)


_NEW, _FREE = -1, -2


class BatchUpdates:
    """Collects changes from the moment it is made; `take` returns them and starts anew. Call `close` when done.

        updates = BatchUpdates(states)
        …steps…
        if change := updates.take(): processor.update(change)

    A request that came and went between two calls is not mentioned. States nobody watches pay nothing.
    """

    __slots__ = ("_origin", "_removed", "_states")

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._origin: dict[int, int] = {}  # touched row → the row its request had at the last take, _NEW or _FREE
        self._removed: list[int] = []
        states.watchers.append(self)

    def close(self) -> None:
        """Stop watching."""
        self._states.watchers.remove(self)

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
        """The origin of what stood in ``row`` and has just gone to ``holder``."""
        return self._origin.get(row, row if self._states.live[holder] else _FREE)

    def take(self) -> BatchUpdate:
        """The changes since the last call."""
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

    def _added(self, row: int) -> AddedRow:
        s = self._states
        prompt, known = int(s.prompt_len[row]), int(s.num_tokens[row])
        tokens = s.token_ids[row]
        return AddedRow(row, s.req_id_of(row), s.sampling.params.get(row), tokens[:prompt], tokens[prompt:known])
