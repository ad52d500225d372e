"""A thread that serves several clients fairly."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Runs functions one at a time, in a thread. Clients take turns: each waits for one function of every other client,
    however many these have.
    """

    def __init__(self, name: str) -> None:
        self._executor, self._lock = ThreadPoolExecutor(1, name), Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[T], Callable[[], T]]]] = OrderedDict()

    def submit(self, client: str, function: Callable[[], T]) -> Future[T]:
        """Run a function at the client's turn."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, function))
            self._executor.submit(self._run_next)
        return future

    def close(self) -> None:
        """End the thread after the function that runs, and cancel those that wait. Nothing can be submitted then."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for future in (future for queue in self._waiting.values() for future, _ in queue):
                future.cancel()
            self._waiting.clear()

    def _run_next(self) -> None:
        with self._lock:
            client, queue = self._waiting.popitem(last=False)
            future, function = queue.popleft()
            if queue:
                self._waiting[client] = queue
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
