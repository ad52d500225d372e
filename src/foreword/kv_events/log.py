"""The cache events of an engine, kept for another thread."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from foreword.cache import CacheEvent
from foreword.engine import EngineObserver


class CacheLog(EngineObserver):
    """Queues the cache events of an engine, in order. Give it to the engine when that is made: see `Observers.add`.

    The engine's thread only appends to the queue; everything else is done by the thread that takes.
    """

    def __init__(self) -> None:
        self._events: SimpleQueue[CacheEvent] = SimpleQueue()

    def cache_event(self, event: CacheEvent) -> None:
        self._events.put(event)

    def take(self, most: int, timeout: float) -> list[CacheEvent]:
        """The oldest events, at most this many; waits for the first one, at most timeout seconds."""
        found: list[CacheEvent] = []
        try:
            found.append(self._events.get(timeout=timeout))
            while len(found) < most:
                found.append(self._events.get_nowait())
        except Empty:
            pass
        return found
