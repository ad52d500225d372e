"""One thread that does one thing at a time beside its owner, handed over with two locks: some microseconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Helper(Generic[T]):
    """
    helper.start(work)       work() runs in the helper's thread while the owner goes on
    helper.wait()            until it is done; the work is then no longer running, whatever came of it
    helper.result()          what it returned; what it raised is raised
    """

    def __init__(self) -> None:
        self._desk: _Desk[T] = _Desk()
        Thread(target=self._desk.serve, name="foreword-helper", daemon=True).start()
        self.close = weakref.finalize(self, self._desk.start, None)  # an owner that is forgotten leaves no thread

    def start(self, work: Callable[[], T]) -> None:
        """One at a time: waits for the last one."""
        self._desk.start(work)

    def wait(self) -> None:
        """At once where nothing runs. If an interrupt ends it early, wait again."""
        with self._desk.done:
            pass

    def result(self) -> T:
        """Of the work that was waited for, once."""
        desk = self._desk
        error, desk.error = desk.error, None
        if error is not None:
            raise error
        results, desk.results = desk.results, []
        return results[0]


class _Desk(Generic[T]):
    """What owner and thread share. ``given`` is open while there is work to take up, ``done`` while none goes on."""

    def __init__(self) -> None:
        self.given, self.done = Lock(), Lock()
        self.given.acquire()
        self.work: Callable[[], T] | None = None
        self.results: list[T] = []
        self.error: BaseException | None = None

    def start(self, work: Callable[[], T] | None) -> None:
        """None ends the thread."""
        self.done.acquire()
        self.work = work
        self.given.release()

    def serve(self) -> None:
        while True:
            self.given.acquire()
            work, self.work = self.work, None
            if work is None:
                return
            try:
                self.results = [work()]
            except BaseException as error:
                self.error = error
            del work  # it must not keep the owner alive
            self.done.release()
