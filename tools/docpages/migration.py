"""The table of names of docs/from-other-engines.md."""

from __future__ import annotations

from docpages.marks import with_table
from foreword.names import OTHERS


def with_table_of_names(page: str) -> str:
    """Return the page with a row per name of another system."""
    rows = [
        (f"`{theirs}`", " or ".join(f"`{name}`" for name in ours) or "–", remark)
        for theirs, (ours, remark) in sorted(OTHERS.items(), key=lambda row: row[0].lstrip("-"))
    ]
    return with_table(page, "names", ("there", "here", "remark"), rows)
