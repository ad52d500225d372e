"""The command in processes of its own: with pipes, and on a terminal. They are forked, which is faster than a start."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from warm_start import READ_BY_PYTHON, Process, WarmStart

import foreword

SOURCE = str(Path(foreword.__file__).parents[1])
MAIN = "from foreword.cli import main; main()"
# A terminal sends a signal for Ctrl-C only to processes that it controls.
ON_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {MAIN}"
PATIENCE = 60.0
ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


@cache
def _warm_start() -> WarmStart:
    return WarmStart({**os.environ, "PYTHONPATH": SOURCE})


def start(
    *arguments: object, program: str = MAIN, env: Mapping[str, str] | None = None, **options
) -> subprocess.Popen | Process:
    """`foreword` with these arguments; input and outputs are pipes unless given. options: those of `subprocess.Popen`.

    A start of Python is only made if it would read one of the variables.
    """
    given = {name: options.pop(name, subprocess.PIPE) for name in ("stdin", "stdout", "stderr")}
    environment = {**os.environ, "PYTHONPATH": SOURCE, **(env or {})}
    words = list(map(str, arguments))
    if any(name.startswith(READ_BY_PYTHON) for name in env or {}):
        return subprocess.Popen([sys.executable, "-c", program, *words], **given, **options, env=environment)
    return _warm_start().start(program, words, given, env=environment, **{"cwd": os.getcwd(), **options})


def run(*arguments: object, input: bytes = b"", **options) -> tuple[int, str, str]:
    """Exit status, output and standard error."""
    with start(*arguments, **options) as process:
        out, error = process.communicate(input, timeout=PATIENCE)
    return process.returncode, out.decode(), error.decode()


class Terminal:
    """`foreword` on a terminal of its own, whose screen is `shown`; other streams can be given in place of it."""

    def __init__(self, *arguments: object, columns: int = 80, **streams) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        attributes = termios.tcgetattr(slave)
        attributes[tty.LFLAG] |= termios.NOFLSH  # otherwise Ctrl-C discards what was printed and not yet read here
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        every = {**dict.fromkeys(("stdin", "stdout", "stderr"), slave), **streams}
        self.process = start(*arguments, program=ON_TERMINAL, start_new_session=True, **every)
        os.close(slave)
        self.shown = ""
        self._prompted = 0  # up to where prompts were answered

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def answer_prompt(self, text: str) -> None:
        """Wait for the next prompt of a chat and type a text; typed earlier, Ctrl-D would be lost."""
        self.read_until(">>> ", after=self._prompted)
        self._prompted = self.plain.index(">>> ", self._prompted) + 1
        self.send(text)

    def interrupt_prompt(self, wanted: str | None = None) -> None:
        """Press Ctrl-C at the next prompt, and again every two seconds, until the pattern is shown or the process ends.

        Python's readline shows the prompt before it waits for input, and does not see a signal that comes in between.
        """
        self.answer_prompt("\x03")
        pressed = time.monotonic()

        def is_done() -> bool:
            nonlocal pressed
            if time.monotonic() > pressed + 2:
                self.send("\x03")
                pressed = time.monotonic()
            shown = wanted is not None and re.search(wanted, self.plain) is not None
            return shown or self.process.poll() is not None

        self._read(is_done, None)

    def read_until(self, wanted: str, after: int = 0) -> str:
        """Return what is shown when the pattern is found in it, past the first ``after`` characters."""
        return self._read(lambda: re.search(wanted, self.plain[after:]) is not None, wanted)

    def end(self) -> int:
        """Read until the process ends. Its exit status."""
        self._read(lambda: False, None)
        return self.process.wait(PATIENCE)

    @property
    def plain(self) -> str:
        """Return what is shown, without escape sequences."""
        return ESCAPES.sub("", self.shown)

    def _read(self, is_done, wanted: str | None) -> str:
        until = time.monotonic() + PATIENCE
        while not is_done():
            assert time.monotonic() < until, f"waited for {wanted!r}, and there is {self.shown[-2000:]!r}"
            if not select.select([self._master], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux: the other side was closed
                data = b""
            if not data:
                assert wanted is None, f"ended without {wanted!r}: {self.shown[-2000:]!r}"
                break
            self.shown += data.decode(errors="replace")
        return self.plain
