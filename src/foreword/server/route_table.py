"""The table of routes on a page: ``python -m foreword.server.route_table docs/server.md`` writes it."""

import re
import sys
from pathlib import Path

from foreword.server.operations import OPERATIONS

BEGIN = "<!-- The table is written by `python -m foreword.server.route_table docs/server.md`. -->\n"
END = "<!-- End of the table. -->\n"


def table() -> str:
    """Return a row per operation: method and path, access, replicas, and what it does."""
    head = ("route", "access", "replicas", "what it does"), ("---",) * 4
    rows = [
        (f"`{one.method} {one.shown_path}`", one.access, one.replicas.name, f"{one.summary} {one.details}".strip())
        for one in OPERATIONS
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows))


def with_table(page: str) -> str:
    """Return the page with the table between its marks."""
    return re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text()))
