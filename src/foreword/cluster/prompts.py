"""Find the beginning of a request's prompt for a router, without tokenizing it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from foreword.routing import text_prefix
from foreword.server.errors import HttpError
from foreword.server.reply import decoded, in_turn

PIECE = 512  # characters
TOKENS_PER_PIECE = 128  # typical value
MAX_CHARACTERS = 1 << 18
FIELDS = ("model", "tools", "system", "messages", "prompt", "input")


async def pieces_of(scope: Scope, body: bytes) -> tuple[int, list[int]]:
    """Return an estimate of the number of prompt tokens in a body, and the names of the prompt's pieces."""
    return await in_turn(scope, len(body), _pieces, body)


def _pieces(body: bytes) -> tuple[int, list[int]]:
    try:
        given = decoded(body)
    except HttpError:
        return 1, []
    if not isinstance(given, dict):
        return 1, []
    # The fields have the order in which they become a prompt.
    text = b"".join(msgspec.json.encode(given[name]) for name in FIELDS if name in given).decode()
    return 1 + len(text) * TOKENS_PER_PIECE // PIECE, text_prefix(text[:MAX_CHARACTERS], size=PIECE)
