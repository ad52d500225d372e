"""Keep the typed lines and the last conversation for later chats, in files that only their owner can read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foreword.cli.conversation import Conversation
from foreword.cli.terminal import note
from foreword.errors import ConfigError, reason_of

MOST_LINES = 1000


def state_folder() -> Path:
    """Return $FOREWORD_HOME, else $XDG_STATE_HOME/foreword, else ~/.local/state/foreword."""
    if home := os.environ.get("FOREWORD_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "foreword"


class Kept:
    """The files in a folder. If the folder cannot be written, this is reported once, and the chat continues without
    it.
    """

    def __init__(self, folder: Path) -> None:
        self._history, self._talk = folder / "chat-history", folder / "last-chat.json"
        self._works, self._last = True, ""

    def lines(self) -> list[str]:
        """Return the last typed lines, the oldest one first."""
        try:
            lines = self._history.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > 2 * MOST_LINES:
            with self._reported():
                _replace(self._history, "".join(f"{line}\n" for line in lines[-MOST_LINES:]))
        return lines[-MOST_LINES:]

    def add(self, line: str) -> None:
        """Keep a typed line, unless it is empty or equal to the one before."""
        if line.strip() and line != self._last and self._works:
            self._last = line
            with self._reported():
                _make_folder(self._history.parent)
                handle = os.open(self._history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                    os.fchmod(handle, 0o600)
                    file.write(f"{line}\n")

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation. It replaces the one before."""
        if self._works:
            with self._reported():
                _make_folder(self._talk.parent)
                _replace(self._talk, conversation.text)

    def load(self, conversation: Conversation) -> None:
        """Read the conversation that was kept. Raise ConfigError if there is none."""
        if not self._talk.exists():
            raise ConfigError(f"--continue: {self._talk} does not exist: no conversation was kept; leave it out")
        conversation.load(self._talk)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._works = False
            note(f"nothing is kept for later chats: {self._talk.parent}: {reason_of(error)}; see --no-history")


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner can read, as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
