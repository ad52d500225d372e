"""Tables inside of pages that are otherwise written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def with_table(page: str, name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the page with a table between the comments ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    lines = "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))
    return with_text(page, name, lines.removesuffix("\n"))


def with_text(page: str, name: str, text: str) -> str:
    """Return the page with a text between the same comments."""
    before, rest = page.split(f"<!-- {name} -->\n")
    after = rest[rest.index(f"<!-- /{name} -->") :]
    return f"{before}<!-- {name} -->\n{text}\n{after}"
