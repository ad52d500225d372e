"""The table of routes of docs/server.md."""

from __future__ import annotations

from docpages.marks import with_table
from foreword.server.operations import OPERATIONS


def with_table_of_routes(page: str) -> str:
    """Return the page with a row per operation: method and path, access, replicas, and what it does."""
    rows = [
        (f"`{one.method} {one.shown_path}`", one.access, one.replicas.name, f"{one.summary} {one.details}".strip())
        for one in OPERATIONS
    ]
    return with_table(page, "routes", ("route", "access", "replicas", "what it does"), rows)
