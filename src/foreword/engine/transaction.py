"""Changes of an engine: one at a time, in one process, and undone if they fail anywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType

from foreword.errors import EngineError


def check_process(owner: int) -> None:
    """Raise EngineError in a process that was forked from the ``owner``, a process id."""
    if os.getpid() != owner:
        raise EngineError(
            f"this engine belongs to process {owner}, whose threads a fork does not copy: make a new one here"
        )


class Transaction:
    """``with transaction:`` around a change of ``owner``, in its methods named ``methods``.

    A change that raises is followed by ``restore``, which makes the state of the owner whole again. If that is
    interrupted too, the next change begins with it. Raise EngineError for a change from a second thread or from a
    callback while one is in progress, and in a process that was forked after the owner was made.
    """

    __slots__ = ("_claims", "_methods", "_owner", "_pid", "_restore", "_turn")

    def __init__(self, owner: object, methods: tuple[str, ...], restore: Callable[[], None]) -> None:
        self._owner, self._methods, self._restore = owner, methods, restore
        self._pid = os.getpid()
        # The change of turn t belongs to the thread whose claim is _claims[t]. Only dict.setdefault gives a turn away,
        # which is atomic, and no claim is lost to an interrupt as a lock would be. A claim that is left behind is one
        # of a change that was interrupted before its end.
        self._turn = 0
        self._claims: dict[int, tuple[int]] = {}

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            check_process(self._pid)
        claim = (get_ident(),)
        while True:
            turn = self._turn
            while (held := self._claims.setdefault(turn, claim)) is not claim:
                self._check_free(held[0])
                turn += 1
            if turn >= self._turn:
                break
            self._claims.pop(turn, None)  # others ended this turn after it was read
        if turn > self._turn:
            self._restore()
            for old in list(self._claims):
                if old < turn:
                    self._claims.pop(old, None)
            self._turn = turn

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._restore()
        turn = self._turn
        self._turn = turn + 1
        self._claims.pop(turn, None)

    def _check_free(self, thread: int) -> None:
        """Raise EngineError unless the change of this thread has ended."""
        if thread != get_ident():
            if self._changes_in(sys._current_frames().get(thread)):
                raise EngineError(
                    "another thread is using this engine: use it from one thread at a time, or serve many with AsyncLLM"
                )
        elif self._changes_in(sys._getframe(3)):  # above the caller of __enter__
            raise EngineError("this engine is in the middle of a step: call it after the callback has returned")

    def _changes_in(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in self._methods and frame.f_locals.get("self") is self._owner:
                return True
            frame = frame.f_back
        return False
