"""Changes of an engine: one at a time, in one process, and undone if they fail anywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType

from foreword.errors import EngineError


def check_process(owner: int) -> None:
    """EngineError in a process that was forked from the ``owner``, a process id."""
    if os.getpid() != owner:
        raise EngineError(
            f"this engine belongs to process {owner}, whose threads a fork does not copy: make a new one here"
        )


class Transaction:
    """``with transaction:`` around a change of ``owner``, in its methods named ``methods``.

    A change that raises is followed by ``restore``, which makes the state of the owner whole again. If that is
    interrupted too, the next change begins with it. EngineError for a change from a second thread or from a callback
    while one is in progress, and in a process that was forked after the owner was made.
    """

    __slots__ = ("_holder", "_methods", "_owner", "_pid", "_restore")

    def __init__(self, owner: object, methods: tuple[str, ...], restore: Callable[[], None]) -> None:
        self._owner, self._methods, self._restore = owner, methods, restore
        self._pid = os.getpid()
        self._holder: int | None = None  # the thread in a change, or of a change that ended without its restore

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            check_process(self._pid)
        if self._holder is not None:
            self._check_free(self._holder)
            self._restore()
        self._holder = get_ident()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._restore()
        self._holder = None

    def _check_free(self, thread: int) -> None:
        """EngineError unless the change of this thread has ended."""
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
