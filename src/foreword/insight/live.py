"""The last steps of a running engine for its page, from the ring of its recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from foreword.engine.recorder import EngineRecorder
from foreword.errors import ForewordError
from foreword.insight.shown import Shown, TextOf
from foreword.trace.events import Step
from foreword.trace.header import TokenIds
from foreword.trace.privacy import cover_of
from foreword.trace.recorder import Encoder
from foreword.trace.replay import Replay
from foreword.trace.ring import Place, Recent

MAX_STEPS = 1024
"""Number of steps after which the page begins again with the steps of the ring."""
STEPS_PER_PART = 16
REST = 5
"""The pause of the replay after each step, as a multiple of the time that the step took. It leaves time to the engine's
thread."""


class LiveSteps:
    """Follows an engine while a page is open; costs nothing otherwise.

        recent = recorder.recent(live.place)   # in the engine's thread: copies lists
        live.follow(recent)                    # in another thread: replays the new steps, with pauses
        live.index(encode), live.part(1, "s3")  # JSON

    place: the place in the ring up to which it has followed; None: it begins with everything in the ring. epoch: how
    often it has begun. Within an epoch, parts are only added to.
    """

    def __init__(self, recorder: EngineRecorder, name: str, token_ids: TokenIds, text_of: TextOf) -> None:
        self.place: Place | None = None
        self.epoch = 0
        self._name, self._text_of, self._header = name, text_of, recorder.header(token_ids)
        self._lock = Lock()
        self._encoder = Encoder(len(self._header.kv_groups))
        self._cover = cover_of(self._header)
        self._shown: Shown | None = None
        self._damage = ""
        self._version = 0  # events of the epoch

    def follow(self, recent: Recent) -> None:
        """Replay the events in the ring since `place`. Raise PlanError if the engine's sizes are too large for a
        replay.
        """
        with self._lock:
            if recent.snapshot is not None or self._shown is None:
                self._begin(recent)
        assert self._shown is not None
        try:
            for event in self._encoder.events(recent.captured):
                started = time.perf_counter()
                with self._lock:
                    self._shown.apply(self._cover(event))
                    self._version += 1
                if isinstance(event, Step):
                    time.sleep(REST * (time.perf_counter() - started))
        except ForewordError as error:  # for example after an interrupt, because of which an event may be missing
            self._damage, self.place = str(error), None
            return
        self.place = recent.place if self._shown.replay.num_steps < MAX_STEPS else None

    def index(self, encode: Callable[[Any], bytes]) -> bytes:
        """Return the data that the page reads first, as JSON. encode: a fast encoder, because other threads wait for
        it.
        """
        with self._lock:
            index: dict[str, Any] = {"epoch": self.epoch, "version": self._version, "damage": self._damage}
            return encode({} if self._shown is None else self._shown.index(self._name) | index)

    def part(self, epoch: int, name: str) -> str:
        """Return the JSON of a part: "s3" of steps, "b7" of what was written to block 7. Raise LookupError for any
        other name, and for parts of an earlier epoch.
        """
        kind, number = name[:1], name[1:]
        with self._lock:
            if epoch != self.epoch or self._shown is None:
                raise LookupError("these steps are no longer kept")
            if kind not in ("s", "b") or not (number.isascii() and number.isdecimal() and len(number) < 10):
                raise LookupError(f"there is no part {name!r:.40}")
            return self._shown.part(int(number)) if kind == "s" else self._shown.writes([int(number)])

    def _begin(self, recent: Recent) -> None:
        header = self._header.beginning_at(recent.first_step)
        self._shown = Shown(header, Replay(header), STEPS_PER_PART, self._text_of)
        self.epoch += 1
        self._damage, self._version = "", 0
        for request in self._encoder.live(recent.snapshot or []):
            self._shown.apply(self._cover(request))
