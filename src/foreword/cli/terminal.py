"""Standard input and notes on standard error, on a terminal and without one."""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import sys
from types import FrameType
from typing import Any, Self

from foreword.errors import RequestError

PATIENCE = 3.0  # seconds


def has_input() -> bool:
    """Whether standard input is a file, a pipe or a socket: not a terminal, not another device, not closed."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read_input() -> str:
    """Standard input up to its end, without its last line break. RequestError if it is not UTF-8.

    Where nothing comes for some seconds, such as from a program that left its end of a pipe open, a note says so.
    """
    if sys.platform != "win32" and not select.select([0], [], [], PATIENCE)[0]:
        note("waiting for standard input; with </dev/null it is not read")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        at = data[error.start : error.start + 20]
        reason = f"is not UTF-8 at byte {error.start}"
        raise RequestError(None, "standard input", at, reason, "Convert it, such as with iconv.") from None


def note(*parts: str) -> None:
    """Print a dim line on standard error; in a narrow window one line per part. NO_COLOR and TERM=dumb: not dim."""
    text = " · ".join(parts)
    if len(text) > shutil.get_terminal_size().columns:
        text = "\n".join(parts)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


class Interrupt:
    """Inside ``with``, the first Ctrl-C sets ``pressed``; the next one raises KeyboardInterrupt as ever."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as in a job that a shell started in the background
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
