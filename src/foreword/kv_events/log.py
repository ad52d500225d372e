"""Queue the cache events of an engine for another thread."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from foreword.cache import CacheEvent
from foreword.engine import EngineObserver


class CacheLog(EngineObserver):
    """Queue the cache events of an engine, in order. It must be added when the engine is created: see `Observers.add`.

    The engine's thread only appends to the queue; the thread that takes the events does all other work.
    """

    def __init__(self) -> None:
        self._events: SimpleQueue[CacheEvent] = SimpleQueue()

    def cache_event(self, event: CacheEvent) -> None:
        self._events.put(event)

    def take(self, most: int, timeout: float) -> list[CacheEvent]:
        """Return the oldest events, at most this many. Wait for the first one for at most timeout seconds."""
        found: list[CacheEvent] = []
        try:
            found.append(self._events.get(timeout=timeout))
            while len(found) < most:
                found.append(self._events.get_nowait())
        except Empty:
            pass
        return found
