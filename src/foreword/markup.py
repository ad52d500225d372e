"""Tables as HTML, for notebooks that show values by `_repr_html_`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_ROWS = 200
"""Rows that are shown; of further ones the number."""
CELL = "text-align:left;white-space:pre-wrap;vertical-align:top"


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are texts, in which nothing is markup."""
    listed = [[str(cell) for cell in row] for row in rows]
    parts = [f'<table><caption style="text-align:left">{escape(caption)}</caption><thead><tr>']
    parts += [f'<th style="{CELL}">{escape(heading)}</th>' for heading in headings]
    parts.append("</tr></thead><tbody>")
    for row in listed[:MAX_ROWS]:
        parts.append("<tr>" + "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row) + "</tr>")
    if (more := len(listed) - MAX_ROWS) > 0:
        parts.append(f'<tr><td colspan="{len(headings)}">and {more} more</td></tr>')
    return "".join([*parts, "</tbody></table>"])


def preformatted(text: str) -> str:
    """Return a text with its line ends and spaces."""
    return f"<pre>{escape(text)}</pre>"
