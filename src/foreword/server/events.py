"""Answers that come in pieces: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.openai.frames import EVENTS, LINES

STREAMS = (EVENTS.encode(), LINES.encode())
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each frame on at once
]


class EventStream(Response):
    """Sends frames as they come, and another one whenever there was none for some seconds.

    The status and headers are sent at once. While the client does not read, no frame is asked for. An exception of the
    frames ends the stream with an event that says so; see `foreword.server.gate`.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes, None], *, silence: float, keep_alive: bytes, media_type: str = EVENTS
    ) -> None:
        """Send ``keep_alive`` after so many seconds of silence; with b"", send nothing."""
        super().__init__(media_type=media_type)
        self._head = (b"content-type", f"{media_type}; charset=utf-8".encode()), *HEADERS
        self._frames, self._silence, self._keep_alive = frames, silence, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        is_sending, sent_at = False, loop.time()

        async def send_frame(frame: bytes) -> None:
            nonlocal is_sending, sent_at
            is_sending = True
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            is_sending, sent_at = False, loop.time()

        async def comment() -> None:
            while True:
                await asyncio.sleep(self._silence - min(loop.time() - sent_at, 0.9 * self._silence))
                if not is_sending and loop.time() - sent_at >= self._silence:
                    await send_frame(self._keep_alive)

        comments = loop.create_task(comment()) if self._keep_alive else None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            async for frame in self._frames:
                if frame:
                    await send_frame(frame)
        finally:
            if comments is not None:
                comments.cancel()
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": b""})
