"""Which models batches may have loaded: those that have room, and others in turns.

    model of a line ─▶ loaded, or room for it ────────────────────────────────────────────────────▶ go
                    └▶ no room ─▶ no client uses, and no batch is in its turn of, what would go ─▶ go: a new turn

A turn counts from the moment at which the model is loaded. Of batches that may go, the one goes first that waits for
longest.
"""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import NamedTuple

from foreword.server.models import ModelEntry, Models

TURN_SECONDS = 60.0  # for which a batch has its model before it may be unloaded for another batch
PATIENCE = 600.0  # seconds that a batch waits for models that clients use again and again, before one of them goes
PAUSE = 0.2  # seconds between looks


class _Waiting(NamedTuple):
    entry: ModelEntry
    since: float


class ModelTurns:
    """The models that the batches of a server use, one batch of each owner at a time."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._used: dict[str, ModelEntry] = {}  # by owner; it is loaded, or going to be
        self._waiting: dict[str, _Waiting] = {}  # by owner, in the order of arrival

    async def take(self, owner: str, entry: ModelEntry) -> None:
        """Wait until a model is loaded, or may be loaded, for the batch of an owner, which uses no other model then.
        Raise HttpError 503 if its files cannot be read.
        """
        if self._used.get(owner) is not entry or not entry.is_loaded:
            self.leave(owner)
        if not entry.is_loaded:
            self._waiting[owner] = _Waiting(entry, time.monotonic())
            try:
                while not entry.is_loaded:
                    if self._others(entry):
                        await self._models.measure(entry)
                    if self._next() == owner:
                        break
                    await asyncio.sleep(PAUSE)
            finally:
                del self._waiting[owner]
            if not entry.is_loaded:
                entry.turn_until = inf
        self._used[owner] = entry

    def begin(self, owner: str) -> None:
        """Let the turn of an owner's model begin, which is loaded now, unless it has begun."""
        entry = self._used[owner]
        if entry.turn_until in (inf, -inf):
            entry.turn_until = time.monotonic() + TURN_SECONDS

    def leave(self, owner: str) -> None:
        """Note that the batch of an owner uses no model. Leaving twice is harmless."""
        entry = self._used.pop(owner, None)
        if entry is not None and (entry.context is None or entry not in self._used.values()):
            entry.turn_until = -inf

    def _next(self) -> str | None:
        """Return the owner, of those who wait, whose model may be loaded now; None if there is none."""
        return next((owner for owner, waiting in self._waiting.items() if self._may_load(waiting)), None)

    def _others(self, entry: ModelEntry) -> list[ModelEntry]:
        """Return the other models that are loaded, or going to be for a batch."""
        used = self._used.values()
        return [one for one in self._models.entries if one is not entry and (one.state != "unloaded" or one in used)]

    def _may_load(self, waiting: _Waiting) -> bool:
        """Return whether a model has room, or only takes that of models that neither clients nor other batches need; it
        fails at once if even pinned models leave too little.
        """
        entry, models, used = waiting.entry, self._models, self._used.values()
        if not (others := self._others(entry)):
            return True
        if entry.is_loaded or entry.needs is None:
            return False
        is_patient = time.monotonic() - waiting.since < PATIENCE
        needed = [one for one in others if (one in used and one.is_in_turn) or (is_patient and one.is_of_clients)]
        return models.has_room(entry, others) or models.has_room(entry, needed) or not models.has_room(entry, ())
