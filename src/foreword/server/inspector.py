"""The live page's access to the steps of the server's engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from foreword.engine.async_engine import AsyncEngine
from foreword.engine.recorder import EngineRecorder
from foreword.models.tokenizer import Tokenizer
from foreword.server.errors import HttpError
from foreword.server.failures import NOT_FOUND
from foreword.trace.header import TokenIds

if TYPE_CHECKING:
    from foreword.insight.live import LiveSteps  # which most servers never need

SHORTEST = 0.5
"""Seconds for which an answer holds: several pages that ask do not cost more than one."""
NO_STEPS = "the engine keeps no steps: start the server with --flight-steps 256"


class Inspector:
    """Follows the engine when it is asked, at most every half second and once at a time.

    token_ids: how the pages see them.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, name: str, token_ids: TokenIds) -> None:
        self._engine, self._tokenizer, self._name, self._token_ids = engine, tokenizer, name, token_ids
        self._live: LiveSteps | None = None
        self._following: asyncio.Task[LiveSteps] | None = None
        self._followed_at = 0.0

    async def index(self) -> bytes:
        """Return what the page reads first, up to the last step. Raise HttpError 404 if the engine keeps no steps."""
        task = self._following
        if task is None or (task.done() and time.monotonic() - self._followed_at > SHORTEST):
            task = self._following = asyncio.create_task(self._follow())
        live = await asyncio.shield(task)  # a client that leaves does not end it: others wait for it, too
        return await asyncio.to_thread(live.index, msgspec.json.encode)

    async def part(self, epoch: int, name: str) -> str:
        """Return a part. Raise HttpError 404 for one that is not kept."""
        if self._live is None:
            raise HttpError(NOT_FOUND, "these steps are no longer kept")
        try:
            return await asyncio.to_thread(self._live.part, epoch, name)
        except LookupError as error:
            raise HttpError(NOT_FOUND, str(error.args[0])) from None

    async def _follow(self) -> LiveSteps:
        try:
            recorder = self._engine.engine.recorder
            if recorder is None:
                raise HttpError(NOT_FOUND, NO_STEPS)
            live = self._live
            if live is None:
                live = self._live = await asyncio.to_thread(self._started, recorder)
            place = live.place
            recent = await self._engine.call(lambda: recorder.recent(place))
            if recent is None:
                raise HttpError(NOT_FOUND, NO_STEPS)
            await asyncio.to_thread(live.follow, recent)
            return live
        finally:
            self._followed_at = time.monotonic()

    def _started(self, recorder: EngineRecorder) -> LiveSteps:
        from foreword.insight.live import LiveSteps
        from foreword.insight.token_text import text_of

        return LiveSteps(recorder, self._name, self._token_ids, text_of(self._tokenizer))
