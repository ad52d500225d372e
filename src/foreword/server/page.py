"""The chat page at /: one static file, which loads nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.models import Models
from foreword.server.operation import OfServer, Operation

PAGE = "chat.html"


@cache
def _html() -> str:
    return files(__package__).joinpath(PAGE).read_text(encoding="utf-8")


async def _page(models: Models, request: Request) -> Response:
    return page_response(_html())


def page_response(html: str) -> Response:
    """Return a page that has one style and one script, which may ask its own server alone."""
    headers = {
        "Content-Security-Policy": policy(html),
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, 200, headers, "text/html")


@cache
def policy(html: str) -> str:
    """Return the page's security policy: its own style and script, and requests to its own server; nothing else."""
    found = {}
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        found[tag] = f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    fixed = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"{fixed}; {found['style']}; {found['script']}"


OPERATIONS = (
    Operation(
        "/",
        OfServer(_page),
        access="public",
        summary="Show a chat page, which asks for a key.",
        media_types=("text/html",),
    ),
)
