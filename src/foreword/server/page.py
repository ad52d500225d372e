"""The chat page at /: one static file, which loads nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from foreword.server.context import Context
from foreword.server.openapi import Operation

PAGE = "chat.html"


def routes_of(context: Context) -> list[Operation]:
    """/."""
    html = files(__package__).joinpath(PAGE).read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
    }

    async def page(request: Request) -> Response:
        """A chat page."""
        return Response(html, 200, headers, "text/html")

    return [Operation("/", page, media_types=("text/html",))]


def policy(html: str) -> str:
    """The page's own style and script, and requests to its own server; nothing else."""
    found = {}
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        found[tag] = f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    fixed = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"{fixed}; {found['style']}; {found['script']}"
