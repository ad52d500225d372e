"""Follow a recipe of CONTRIBUTING.md: edits of files, and the tests that notice each edit."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Change = Callable[[str], str]


@dataclass(frozen=True)
class Edit:
    """An edit of one file of the repository.

    change: the content of the file, "" if it is new → the new content. proof: a test of the recipe that fails without
    the edit, as an argument of pytest; "" for native code.
    """

    path: str
    change: Change
    proof: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe that is followed with a dummy.

    heading: of the recipe. test: the file that a copy gets with the tests of the dummy, which are those of the module
    that defines the recipe. edits: the others. native: those of native code. commands: to run after them, as arguments
    of Python, beside ``make pages``. proofs: tests that the recipe names, as arguments of pytest, which pass after it
    was followed. not_followed: files that the recipe names → why the dummy does not change them.
    """

    heading: str
    test: str
    edits: tuple[Edit, ...]
    proofs: tuple[str, ...]
    native: tuple[Edit, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    not_followed: Mapping[str, str] = field(default_factory=dict)


def new(text: str) -> Change:
    """Write a file that does not exist."""

    def change(content: str) -> str:
        assert content == "", "the file exists already"
        return text

    return change


def after(anchor: str, text: str) -> Change:
    """Insert a text behind the only place that has the anchor."""
    return lambda content: content.replace(anchor, anchor + text) if _is_once(anchor, content) else ""


def before(anchor: str, text: str) -> Change:
    """Insert a text in front of the only place that has the anchor."""
    return lambda content: content.replace(anchor, text + anchor) if _is_once(anchor, content) else ""


def field_of(name: str, text: str) -> Change:
    """Insert a line in front of the first field of a class."""

    def change(content: str) -> str:
        found = re.search(rf"^class {name}\b.*?(?=^    \w+: [^\n]* = \w+\()", content, re.M | re.S)
        assert found, f"there is no class {name} with a field"
        return content[: found.end()] + text + content[found.end() :]

    return change


def _is_once(anchor: str, content: str) -> bool:
    assert content.count(anchor) == 1, f"{anchor!r} is in the file {content.count(anchor)} times, and should be once"
    return True
