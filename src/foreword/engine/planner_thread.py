"""A thread that runs one function at a time while its owner does something else; handing over takes microseconds."""

from __future__ import annotations

import weakref
from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

Outcome = tuple[T | None, BaseException | None]  # what the work returned, or the error it raised


class PlannerThread(Generic[T]):
    """Runs one function at a time in a thread of its own.

    thread.start(work)             work() runs in the thread while the owner continues
    value, error = thread.wait()   when it has ended; once for each start
    thread.settle()                waits until nothing runs, after an interrupt of the owner too; drops all outcomes
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], T | None] | None] = SimpleQueue()
        self._outbox: SimpleQueue[Outcome[T]] = SimpleQueue()
        self.close = weakref.finalize(self, self._inbox.put, None)  # also when the owner is garbage-collected
        # `threading.Thread` waits until the thread runs; an interrupt of that wait can become a RuntimeError.
        start_new_thread(_serve, (self._inbox, self._outbox))

    def start(self, work: Callable[[], T | None]) -> None:
        """Run ``work``, after the one before it has ended."""
        self._inbox.put(work)

    def wait(self) -> Outcome[T]:
        """Return the outcome of the oldest work not waited for."""
        return self._outbox.get()

    def settle(self) -> None:
        """Wait until nothing runs, and forget every outcome."""
        end = _End()
        self._inbox.put(end.reached)
        while self.wait()[1] is not end:
            pass


class _End(Exception):
    """Work that marks a place in the order of the outcomes."""

    def reached(self) -> None:
        raise self


def _serve(inbox: SimpleQueue[Callable[[], T | None] | None], outbox: SimpleQueue[Outcome[T]]) -> None:
    while (work := inbox.get()) is not None:
        try:
            outcome: Outcome[T] = work(), None
        except BaseException as error:
            outcome = None, error
        outbox.put(outcome)
        del work, outcome  # references to the owner
