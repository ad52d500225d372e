"""A thread that runs one function at a time while its owner does something else; handing over takes microseconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class PlannerThread(Generic[T]):
    """
    thread.start(work)       work() runs in the thread while the owner continues
    thread.wait()            returns when it has ended, normally or with an error
    thread.result()          its return value; an error of work() is raised
    """

    def __init__(self) -> None:
        self._mailbox: _Mailbox[T] = _Mailbox()
        Thread(target=self._mailbox.serve, name="foreword-planner", daemon=True).start()
        self.close = weakref.finalize(self, self._mailbox.start, None)  # also when the owner is garbage-collected

    def start(self, work: Callable[[], T]) -> None:
        """Run ``work``, after the one before it has ended."""
        self._mailbox.start(work)

    def wait(self) -> None:
        """Returns at once if nothing runs. After an interrupt, wait again."""
        with self._mailbox.idle:
            pass

    def result(self) -> T:
        """The result of the work that was waited for. Call it once."""
        mailbox = self._mailbox
        error, mailbox.error = mailbox.error, None
        if error is not None:
            raise error
        results, mailbox.results = mailbox.results, []
        return results[0]


class _Mailbox(Generic[T]):
    """The state that owner and thread share. ``posted`` is unlocked when work is posted, ``idle`` while none runs."""

    def __init__(self) -> None:
        self.posted, self.idle = Lock(), Lock()
        self.posted.acquire()
        self.work: Callable[[], T] | None = None
        self.results: list[T] = []
        self.error: BaseException | None = None

    def start(self, work: Callable[[], T] | None) -> None:
        """Post work; None ends the thread."""
        self.idle.acquire()
        self.work = work
        self.posted.release()

    def serve(self) -> None:
        while True:
            self.posted.acquire()
            work, self.work = self.work, None
            if work is None:
                return
            try:
                self.results = [work()]
            except BaseException as error:
                self.error = error
            del work  # a reference to the owner
            self.idle.release()
