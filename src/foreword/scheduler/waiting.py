"""The waiting requests, in the order of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from foreword.scheduler.policies import Policy
from foreword.scheduler.request import Request


class WaitingQueue:
    """A heap by key. Removal from the middle is O(1): the entry becomes stale, and is dropped at the front.

    version: grows with every request that is pushed.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._here: dict[str, Request] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._here

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, in no particular order."""
        return iter(self._here.values())

    def get(self, request_id: str) -> Request | None:
        return self._here.get(request_id)

    def push(self, request: Request) -> None:
        key = self._policy.key_of(request)
        self.version += 1
        self._here[request.request_id] = request
        heappush(self._heap, (key, self.version, request))

    def clear(self) -> None:
        """Remove every request."""
        self._heap, self._here = [], {}

    def peek(self) -> Request:
        """Return the first request. Raise IndexError if the queue is empty."""
        while not self._is_current(self._heap[0][2]):
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        """Remove and return the first request."""
        request = self.peek()
        heappop(self._heap)
        del self._here[request.request_id]
        return request

    def remove(self, request_id: str) -> Request | None:
        """Remove a request from anywhere in the queue. Return None if it is not waiting."""
        request = self._here.pop(request_id, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._here):
            self._heap = [entry for entry in self._heap if self._is_current(entry[2])]
            heapify(self._heap)
        return request

    def _is_current(self, request: Request) -> bool:
        return self._here.get(request.request_id) is request
