"""Read what a user types in a chat: messages of one or more lines, and commands. Nothing here needs a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from foreword.errors import RequestError
from foreword.names import nearest

QUOTES = '"""'


class Interrupted(Exception):
    """Ctrl-C while a message was typed. is_empty: nothing of it was typed."""

    def __init__(self, is_empty: bool) -> None:
        self.is_empty = is_empty
        super().__init__()


@dataclass(frozen=True, slots=True)
class Message:
    """Text for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line such as ``/set temperature 0.7``: its name without the slash, and what follows it."""

    name: str
    argument: str = ""

    @property
    def words(self) -> list[str]:
        """The argument as words, quoted as in a shell. Raise RequestError for an open quote."""
        try:
            return shlex.split(self.argument)
        except ValueError as error:
            fix = "Close the quote, or put a backslash before it."
            raise RequestError(None, f"/{self.name}", self.argument, str(error), fix) from None


def read(next_line: Callable[[bool], str]) -> Message | Command | None:
    '''Return what the next lines say: a command, or a message; None for an empty line.

    next_line: returns a line without its end, given whether it continues a message. Lines from """ to """ are one
    message, taken as it is. A backslash at the end of a line joins the next line, after a line break. A message that
    begins with a slash is typed with two.
    '''
    line = next_line(False)
    if line.lstrip().startswith(QUOTES):
        return Message(_quoted(line.lstrip()[len(QUOTES) :], next_line))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(next_line(True))
    text = "\n".join(lines).strip()
    if text.startswith("/") and not text.startswith("//"):
        name, _, argument = text[1:].partition(" ")
        return Command(name, argument.strip())
    return Message(text.removeprefix("/") if text.startswith("//") else text) if text else None


def _quoted(first: str, next_line: Callable[[bool], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(next_line(True))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def unknown(name: str, known: list[str]) -> RequestError:
    """Return the error for a command that does not exist."""
    close = nearest(name, known)
    guess = "" if close is None else f"Did you mean /{close}? "
    fix = f"{guess}/help lists them; a message that begins with a slash needs two."
    return RequestError(None, "command", f"/{name}", "is not known", fix)
