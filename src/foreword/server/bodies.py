"""The large bodies of the requests in progress: their memory, and the turns in which they are read."""

from __future__ import annotations

import asyncio

from foreword.server.errors import HttpError
from foreword.server.failures import FULL

LARGE = 64 << 10  # bytes of a body, from which on it is counted, and read in a thread


class Bodies:
    """Counts the bytes of large bodies, from their arrival to the end of their requests, so that many clients together
    do not fill the memory. One that is larger than the limit is taken if it is alone.

    turn: held while one is read and checked. Threads that do so at the same time would keep the event loop waiting for
    all of them, since one thread alone runs Python.
    """

    def __init__(self, max_total_body_bytes: int) -> None:
        self.most, self.num_bytes = max_total_body_bytes, 0
        self.turn = asyncio.Lock()


class HeldBody:
    """The part of one body in them."""

    __slots__ = ("_bodies", "_num_bytes")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._num_bytes = bodies, 0

    def grow(self, size: int) -> None:
        """Count a body of which so many bytes have arrived. Raise HttpError 429 if there is no room."""
        if size < LARGE:
            return
        bodies = self._bodies
        others = bodies.num_bytes - self._num_bytes
        if others and others + size > bodies.most:
            reason = f"large bodies in progress have {others} bytes, of max_total_body_bytes = {bodies.most}"
            raise HttpError(FULL, f"the server is full: {reason}. Try again", headers={"Retry-After": "1"})
        bodies.num_bytes, self._num_bytes = others + size, size

    def end(self) -> None:
        """Give the memory back."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0
