"""Limit the work of the event loop for streams, and for requests that begin, before it serves others."""

from __future__ import annotations

import asyncio
from collections import deque

MOST_VALUES = 4096  # that the streams of a server write in one turn of the event loop: a few milliseconds
NUM_TURNS = 8  # turns of the event loop between two requests that begin: each may accept a connection and read a head


class Pace:
    """Lets the streams of one event loop make frames of about `MOST_VALUES` values per turn of it, in the order in
    which they ask. Without it, streams that are all ready at the same time would be served before anything else.
    """

    def __init__(self) -> None:
        self._remaining_values = MOST_VALUES
        self._is_counting = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_values: int) -> None:
        """Wait for a turn in which frames with so many values may be made."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn, loop)
        if self._remaining_values > 0 and not self._waiting:
            self._remaining_values -= num_values
            return
        turn = loop.create_future()
        self._waiting.append((num_values, turn))
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._remaining_values = MOST_VALUES
        while self._waiting and self._remaining_values > 0:
            num_values, turn = self._waiting.popleft()
            if not turn.done():  # its stream was closed
                self._remaining_values -= num_values
                turn.set_result(None)
        self._is_counting = self._remaining_values < MOST_VALUES
        if self._is_counting:
            loop.call_soon(self._next_turn, loop)


class Beginnings:
    """Lets the requests of one event loop begin in the order in which they ask, one in `NUM_TURNS` turns of it.

    The begin of a request that generates takes a millisecond or two. Without it, hundreds of clients that connect at
    the same time would keep a short request, such as one to /health, waiting for all of those whose connections were
    made before; and clients that are gone by then would be served too.
    """

    def __init__(self) -> None:
        self._turns_left = 0  # turns of the event loop until the next may begin
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait until the request may begin."""
        loop = asyncio.get_running_loop()
        if not self._turns_left:
            self._turns_left = NUM_TURNS
            loop.call_soon(self._next_turn, loop)
            return
        begin = loop.create_future()
        self._waiting.append(begin)
        await begin

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turns_left -= 1
        while not self._turns_left and self._waiting:
            begin = self._waiting.popleft()
            if not begin.done():  # its client is still there
                begin.set_result(None)
                self._turns_left = NUM_TURNS
        if self._turns_left:
            loop.call_soon(self._next_turn, loop)
