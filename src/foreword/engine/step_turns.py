"""The turns of engines that share the processors of a machine."""

from __future__ import annotations

from collections import deque
from threading import Lock


class StepTurns:
    """Engines of one process, each in a thread of its own, run a step one after the other, in the order in which they
    asked: a step has all the processors, and none of its threads waits for one that another engine keeps from running.

        with turns:
            engine.step()

    An engine that waits has its turn after one step of each other engine, at most. `threading.Lock` promises no order.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_taken = False
        self._waiting: deque[Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
