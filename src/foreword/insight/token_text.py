"""Make the text of a token short enough for a table."""

from __future__ import annotations

from collections.abc import Callable

from foreword.models.tokenizer import Tokenizer

LONGEST = 24  # characters


def shown_text(data: bytes) -> str:
    r"""Return the text of a token's bytes on one line: "▁" for a space, "\n" for a line break, "<E2>" for a byte that
    is part of a character. Long texts are cut, and end in "…".
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "".join(chr(byte) if 32 <= byte < 127 else f"<{byte:02X}>" for byte in data)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.replace(" ", "▁"))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def text_of(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return the function from a token id to its text in tables."""
    return lambda token_id: shown_text(tokenizer.token_bytes(token_id))
