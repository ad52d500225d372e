"""A trace that a thread writes, so that an engine waits neither for JSON nor for a disk."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread, get_native_id

from foreword.errors import reason_of
from foreword.trace.capture import Captured, Filled
from foreword.trace.header import TraceHeader
from foreword.trace.recorder import Encoder
from foreword.trace.writer import TraceWriter, older

PAUSE = 0.2
"""Seconds in which steps are collected before the thread writes them."""
NICENESS = 10
"""The priority of the writing thread on Linux. It is low, because a thread of the model that has to wait for its core
delays the whole step: all other threads wait for it in each layer. It is not the lowest priority, because the thread
holds the interpreter's lock while it encodes, and the engine's thread waits for that lock.
"""
MAX_PENDING = 4096
"""Largest number of steps that wait to be written. Further steps are dropped, and the trace says that they are
missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """The requests in progress before the step of this number. They begin a new part of the trace or, with a reason,
    follow a gap where events are missing.
    """

    snapshot: list[Filled]
    step: int
    reason: str = ""


Item = Sequence[Captured] | Begin


class BackgroundTrace:
    """Writes captured values to a file, in a thread that starts with the first item.

    max_bytes: see `TraceWriter`. An existing file of this name is renamed to the name that `older` returns.
    on_error: called once with a message if the file cannot be written; later items are dropped.
    Raise OSError if the file cannot be made.
    """

    def __init__(
        self, path: Path, header: TraceHeader, on_error: Callable[[str], None], *, max_bytes: int | None = None
    ) -> None:
        if path.exists() and path.stat().st_size:
            path.replace(older(path))
        self._work = _Work(TraceWriter(path, header, max_bytes=max_bytes), len(header.kv_groups), on_error)
        self._thread: Thread | None = None
        self._end = weakref.finalize(self, self._work.close)
        self.lost = ""

    @property
    def wants_snapshot(self) -> bool:
        """Return whether the next step needs `begin` first."""
        return self._work.is_full or (bool(self.lost) and len(self._work.items) < MAX_PENDING // 2)

    @property
    def is_open(self) -> bool:
        """Return whether items are still written: False after an error or `close`."""
        return not self._work.is_ended

    def begin(self, snapshot: list[Filled], step: int) -> None:
        """Begin a new part, or continue after steps that were lost."""
        reason, self.lost = self.lost, ""
        self._put(Begin(snapshot, step, reason))

    def put(self, captured: Sequence[Captured]) -> None:
        """Add these values to the queue of the thread."""
        if len(self._work.items) >= MAX_PENDING:
            self.lost = f"the file is slower than the engine: {MAX_PENDING} steps waited"
        if captured and not self.lost:
            self._put(captured)

    def flush(self) -> None:
        """Wait until all items are in the file. The thread ends, and starts again with the next item."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.is_stopping.set()
            self._work.wake.set()
            thread.join()
            self._work.is_stopping.clear()
        self._work.write_all()
        self._work.flush()

    def close(self) -> None:
        """Write all remaining items, and close the file."""
        self.flush()
        self._end()

    def end_with(self, captured: Sequence[Captured]) -> None:
        """Write all remaining items and these values, and close the file. No thread is needed, because none can start
        at the exit of the interpreter.
        """
        if captured and not self.lost:
            self._work.items.append(captured)
        self._end()

    def _put(self, item: Item) -> None:
        work = self._work
        if work.is_ended:
            return
        work.items.append(item)
        if self._thread is None:
            self._thread = Thread(target=work.run, name="foreword-trace", daemon=True)
            self._thread.start()
        if not work.wake.is_set():
            work.wake.set()


class _Work:
    """The work of the thread; it does not hold the `BackgroundTrace`, so that an engine without users is freed."""

    def __init__(self, writer: TraceWriter, num_groups: int, on_error: Callable[[str], None]) -> None:
        self.items: deque[Item] = deque()
        self.wake = Flag()
        self.is_full = self.is_ended = False
        self.is_stopping = Flag()
        self._writer, self._encoder, self._on_error = writer, Encoder(num_groups), on_error
        self._lock, self._pid = Lock(), os.getpid()

    def run(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
        while not (self.is_stopping.is_set() or self.is_ended):
            self.wake.wait()
            self.wake.clear()
            self.write_all()
            with self._lock:  # so that a killed process leaves all steps but those of about the last PAUSE
                self._attempt(self._writer.sync)
            self.is_stopping.wait(PAUSE)

    def write_all(self) -> None:
        with self._lock:
            self._attempt(self._write_items)

    def flush(self) -> None:
        with self._lock:
            self._attempt(self._writer.flush)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked process has a copy of the buffer and must not write it
            return
        self.write_all()
        with self._lock:
            self._attempt(self._writer.close)
            self.is_ended = True
        self.wake.set()

    def _write_items(self) -> None:
        while self.items:
            self._write(self.items.popleft())

    def _attempt(self, call: Callable[[], object]) -> None:
        if self.is_ended:
            self.items.clear()
            return
        try:
            call()
        except Exception as error:  # any error: the engine continues without a recording
            self.is_ended = True
            with suppress(OSError):
                self._writer.close()
            reason = reason_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._on_error(f"{self._writer.path}: the recording of steps ended early ({reason}); the engine goes on")

    def _write(self, item: Item) -> None:
        writer, encoder = self._writer, self._encoder
        if isinstance(item, Begin):
            live = encoder.live(item.snapshot)
            if item.reason:
                writer.restart(item.step, item.reason)
                for request in live:
                    writer.write(request)
            else:
                writer.rotate(live)
                self.is_full = False
            return
        for event in encoder.events(item):
            writer.write(event)
        self.is_full = writer.is_full
