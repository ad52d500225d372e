"""Lists in OpenAI's form, page by page, as the query of a request asks for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request

from foreword.server.errors import HttpError
from foreword.server.failures import INVALID
from foreword.server.store import Page

MOST = 10_000  # items of a page


def page_of(request: Request, *, limit: int = 20, also: Collection[str] = ()) -> Page:
    """Return what the query asks for. also: further names that it may have. Raise HttpError 400 for any other."""
    query = check_query(request, ("limit", "after", "order", *also))
    text, order = query.get("limit", str(limit)), query.get("order", "desc")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST:
        raise HttpError(INVALID, f"limit = {text!r:.80}: must be from 1 to {MOST}", param="limit")
    if order not in ("asc", "desc"):
        raise HttpError(INVALID, f"order = {order!r:.80}: must be asc or desc", param="order")
    return Page(int(text), query.get("after"), order == "desc")


def check_query(request: Request, names: Collection[str] = ()) -> dict[str, str]:
    """Return the query, which has no other names than these, and each once. Raise HttpError 400 for any other."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise HttpError(INVALID, f"{name:.80}: the query cannot have it. Leave it out", param=name)
        if name in query:
            raise HttpError(INVALID, f"{name}: the query has it twice. Give it once", param=name)
        query[name] = value
    return query


def listing(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}


def paged(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Return a page of items that are in the order of their making. Raise HttpError 400 for an unknown id."""
    ordered = items[::-1] if page.newest_first else items
    if page.after is not None:
        at = next((i for i, item in enumerate(ordered) if item["id"] == page.after), None)
        if at is None:
            raise HttpError(INVALID, f"after = {page.after!r:.80}: there is none", param="after")
        ordered = ordered[at + 1 :]
    return listing(ordered[: page.limit], len(ordered) > page.limit)
