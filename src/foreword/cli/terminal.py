"""Standard input and notes on standard error, on a terminal and without one."""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, Self

from foreword.errors import RequestError

PATIENCE = 3.0  # seconds
MIN_COLUMN = 20  # characters of a last column in a narrow window


def has_input() -> bool:
    """Return whether standard input is a file, a pipe or a socket: not a terminal, not another device, not closed."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read_input() -> str:
    """Read standard input up to its end, without its last line break. Raise RequestError if it is not UTF-8.

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


def terminal_width() -> int | None:
    """Return the characters of a line of the terminal, or COLUMNS; None without either, as in a pipe."""
    return shutil.get_terminal_size((0, 0)).columns or None


def print_text(text: str) -> None:
    """Print a text in lines of the width of the terminal, in one without a terminal."""
    print(*_wrapped(text, terminal_width() or 0), sep="\n")


def print_rows(rows: Iterable[Sequence[str]], colors: Mapping[str, str] = MappingProxyType({})) -> None:
    """Print rows in columns. All but the last are shown in full; the last is wrapped to the width of the terminal, or
    to COLUMNS, and not at all without either, as in a pipe.

    colors: a text of the first column → the ANSI code of its colour on a terminal.
    """
    table = [list(row) for row in rows]
    width = terminal_width()
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    indent = sum(widths) + 2 * len(widths)
    has_colors = sys.stdout.isatty() and not _is_plain()
    for *cells, last in table:
        begin = "".join(f"{cell:<{size}}  " for cell, size in zip(cells, widths, strict=True))
        if has_colors and cells[0] in colors:
            begin = f"\x1b[{colors[cells[0]]}m{cells[0]}\x1b[0m{begin[len(cells[0]) :]}"
        for number, line in enumerate(_wrapped(last, max(width - indent, MIN_COLUMN) if width else 0)):
            print((" " * indent if number else begin) + line)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, in parts of this width; 0: no limit."""
    for line in text.splitlines() or [""]:
        yield from (textwrap.wrap(line, width, break_on_hyphens=False) if width else ()) or [line]


def _is_plain() -> bool:
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def note(*parts: str) -> None:
    """Print a line on standard error, in a narrow window one per part. It is dim without NO_COLOR and TERM=dumb."""
    text = " · ".join(parts)
    if len(text) > shutil.get_terminal_size().columns:
        text = "\n".join(parts)
    if sys.stderr.isatty() and not _is_plain():
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


class Interrupt:
    """Inside ``with``, the first Ctrl-C sets ``pressed``; the next one raises KeyboardInterrupt as usual."""

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
