"""Characters of UTF-8 whose bytes are spread over several tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from foreword.arrays import I32

decoder = codecs.getincrementaldecoder("utf-8")
"""A class whose objects decode a text piece by piece."""
INVALID = "\ufffd"
"""The character that stands for bytes that are not a character."""
LONGEST = 4
"""Bytes, and so at most tokens, of a character."""


def unfinished(token_bytes: Callable[[int], bytes], token_ids: Sequence[int] | I32) -> bytes:
    """Return the beginning of a character that the bytes of tokens end with, b"" if their last character is whole."""
    reader = decoder("replace")
    reader.decode(b"".join([token_bytes(int(i)) for i in token_ids[-LONGEST:]]))
    return reader.getstate()[0]
