"""Raises exceptions at chosen or random moments inside the engine, and ends a test that hangs."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import CodeType, FrameType, TracebackType
from typing import Any

import foreword
from foreword.engine import planner_thread

SRC = str(Path(foreword.__file__).parent)
PLANNER_LOOP = str(Path(SRC) / "engine" / "planner_thread.py")

Line = tuple[CodeType, int]


class Stopped(BaseException):
    """An exception that is no `Exception`, as user code may raise."""


class Hang(BaseException):
    """The work did not end in time. The message has the tracebacks of all threads."""


class Lines:
    """A trace function: counts the lines of Foreword's sources that run, and raises an exception before one of them.

    error: what it raises; None: nothing, it counts alone. after: raise before the line with this number. line: count
    this line alone. hit: where it raised. seen: the number of runs of each line without an error. The loop of the
    planner thread itself is left out there: it calls no user code.
    """

    def __init__(self, error: BaseException | None = None, *, after: int = 0, line: Line | None = None) -> None:
        self.error, self.after, self.line = error, after, line
        self.num_lines = 0
        self.seen: Counter[Line] = Counter()
        self.hit: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SRC) or (name == PLANNER_LOOP and threading.current_thread().daemon):
            return None
        if self.line is not None and frame.f_code is not self.line[0]:
            return None
        return self._count if self.error is None else self._watch

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            self.seen[frame.f_code, frame.f_lineno] += 1
        return self._count

    def _watch(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and (self.line is None or frame.f_lineno == self.line[1]):
            self.num_lines += 1
            if self.num_lines == self.after and self.error is not None:
                self.hit = place(frame)
                raise self.error
        return self._watch


def place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename).relative_to(SRC)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_qualname}"


def place_of(error: BaseException) -> str | None:
    """The innermost line of Foreword in a traceback."""
    found, entry = None, error.__traceback__
    while isinstance(entry, TracebackType):
        if entry.tb_frame.f_code.co_filename.startswith(SRC):
            path = Path(entry.tb_frame.f_code.co_filename).relative_to(SRC)
            found = f"{path}:{entry.tb_lineno} {entry.tb_frame.f_code.co_qualname}"
        entry = entry.tb_next
    return found


@contextlib.contextmanager
def traced(lines: Lines) -> Iterator[None]:
    """The calling thread runs under the trace function."""
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def traced_planner(lines: Lines) -> Iterator[None]:
    """Planner threads that start in the block run under the trace function: `threading.settrace` misses them."""
    serve = planner_thread._serve

    def traced_serve(*queues: Any) -> None:
        sys.settrace(lines)
        serve(*queues)

    planner_thread._serve = traced_serve
    try:
        yield
    finally:
        planner_thread._serve = serve


def runs_foreword(frame: FrameType | None) -> bool:
    """Return whether the frame, or one that called it, runs a line of Foreword."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SRC):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interrupted_by_signals(delays: list[float]) -> Iterator[None]:
    """SIGINT in the main thread after each of these times in seconds, as Ctrl-C sends it, while Foreword runs."""
    left = list(delays)

    def fire(number: int, frame: FrameType | None) -> None:
        if runs_foreword(frame):
            if left:
                signal.setitimer(signal.ITIMER_REAL, left.pop(0))
            signal.raise_signal(signal.SIGINT)

    old = signal.signal(signal.SIGALRM, fire), signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, left.pop(0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old[0])
        signal.signal(signal.SIGINT, old[1])


@contextlib.contextmanager
def interrupted_by_thread(delay: float, error: type[BaseException]) -> Iterator[None]:
    """Another thread raises an exception in the calling one after ``delay`` seconds, if that runs Foreword then."""
    target, done = threading.get_ident(), threading.Event()

    def fire() -> None:
        if not done.wait(delay) and runs_foreword(sys._current_frames()[target]):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(target), ctypes.py_object(error))

    thread = threading.Thread(target=fire)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Raises `Hang` in the main thread after this time, also while it waits for a lock, and again every second until
    the block has ended. If that does not help, the process ends with all tracebacks.
    """
    main, done, stacks = threading.main_thread().ident, threading.Event(), [""]
    assert main is not None

    def bark() -> None:
        wait = seconds
        while not done.wait(wait):
            stacks[0] = stacks[0] or current_stacks()
            signal.pthread_kill(main, signal.SIGUSR1)
            wait = 1.0

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang(f"after {seconds:g} s\n{stacks[0]}")

    old = signal.signal(signal.SIGUSR1, hang)
    thread = threading.Thread(target=bark, daemon=True)
    thread.start()
    faulthandler.dump_traceback_later(seconds + 20, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR1, old)


def current_stacks() -> str:
    """The different stacks of all other threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter(
        f"thread {names.get(ident)}:\n" + "".join(traceback.format_stack(frame)[-8:])
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
    return "\n".join(f"{count} × {stack}" for stack, count in found.items())


def end_process(code: int) -> None:
    """Without waiting for threads or finalizers, which may hang after a failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def some_error(random: Random) -> BaseException:
    return random.choice([KeyboardInterrupt, KeyboardInterrupt, MemoryError, Stopped])("storm")


INJECTED = (KeyboardInterrupt, MemoryError, Stopped)
