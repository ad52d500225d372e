"""Bound the number of tokens of a text, and its growth in a tokenizer, before it is tokenized.

Tokenizing megabytes takes seconds, and longer for some regular expressions, so a text that cannot fit is refused first.
Every character of a text ends in some token unless a part of the tokenizer removes it. Where no part does,

    number of tokens ≥ number of characters / (shrink × characters of the longest token)

with ``shrink`` the characters that normalization may make one of. Where a part may remove characters (spaces around
words or special tokens, accents, unknown characters), there is no bound, and texts are tokenized whatever their length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from foreword.errors import ModelError
from foreword.models.detokenizer import BYTE_OF

_COMPOSED = 4  # characters that canonical composition makes one of, at most
_SHRINKS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_KEEPS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that remove nothing
MAX_GROWTH = 100
"""Characters that the replacements of a normalizer may make of one."""


class TextBound:
    """A lower bound of the number of tokens of a text. Making one takes tens of milliseconds."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._dropped = b""  # bytes without a token, which add nothing to the ids
        self._chars_per_token = 0  # 0: there is no bound
        shrink = _shrink(state_of(backend.normalizer))
        parts, model = steps_of(state_of(backend.pre_tokenizer)), backend.model
        added = backend.get_added_tokens_decoder().values()
        if shrink is None or not all(map(_keeps, parts)) or any(token.lstrip or token.rstrip for token in added):
            return
        if not isinstance(model, tokenizers.models.BPE):
            return
        if model.byte_fallback:
            if not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
                return
        else:
            self._dropped = bytes(byte for char, byte in BYTE_OF.items() if char not in vocabulary)
            if all(part["type"] != "ByteLevel" for part in parts) or (self._dropped and shrink > 1):
                return
        self._chars_per_token = shrink * max(map(len, vocabulary))

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens, 0 if none is known."""
        if not self._chars_per_token:
            return 0
        count = len(text)
        if self._dropped:
            count = min(count, len(text.encode(errors="surrogatepass").translate(None, self._dropped)))
        return -(-count // self._chars_per_token)


def check_growth(backend: tokenizers.Tokenizer) -> None:
    """Raise ModelError if the normalizer replaces a character by more than `MAX_GROWTH`, which no vocabulary needs."""
    if (growth := _growth(state_of(backend.normalizer))) > MAX_GROWTH:
        raise ModelError(f"its normalizer replaces a character by up to {growth:.3g}, more than {MAX_GROWTH}")


def state_of(part: Any) -> Mapping[str, Any]:
    """Return what a part of a tokenizer was made from; an empty sequence for None."""
    return {"type": "Sequence"} if part is None else json.loads(part.__getstate__())


def steps_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts that a state is a sequence of."""
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for part in inner for step in steps_of(part)]


def _shrink(state: Mapping[str, Any]) -> int | None:
    """Return the number of characters that normalization may turn into one; None if it may remove them all."""
    shrink = 1
    for step in steps_of(state):
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": str(content)} if content:
                shrink *= -(-len(pattern) // len(content)) or 1
            case {"type": kind} if kind in _SHRINKS:
                shrink *= _SHRINKS[kind]
            case _:
                return None
    return shrink


def _growth(state: Mapping[str, Any]) -> float:
    growth = 1.0
    for step in steps_of(state):
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                growth *= max(1.0, len(content) / max(1, len(pattern)))
            case {"type": "Replace", "content": text} | {"type": "Prepend", "prepend": text}:
                growth *= 1 + len(text)
    return growth


def _keeps(step: Mapping[str, Any]) -> bool:
    """Return whether a part of pre-tokenization keeps every character."""
    return step["type"] in _KEEPS or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")
