"""A model without weights, whose outputs are known without an engine; `hash_model` says how it checks every read."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from hash_model import HashExecutor

START = 12345


def following(prefix: int, token: int) -> int:
    x = (prefix * 6364136223846793005 + token * 1442695040888963407 + 1) & (2**63 - 1)
    return x ^ (x >> 29)


def following_all(prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`following` of each of uint64 [n] prefixes."""
    multiples = prefixes * np.uint64(6364136223846793005) + tokens.astype(np.uint64) * np.uint64(1442695040888963407)
    x = (multiples + np.uint64(1)) & np.uint64(2**63 - 1)
    return x ^ (x >> np.uint64(29))


def logits_after(prefix: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(prefix).normal(size=vocab_size).astype(np.float32) * 2


class OracleExecutor(HashExecutor):
    """`HashExecutor` with these hashes and logits, whose outputs need no engine."""

    empty_prefix, following = np.uint64(START), staticmethod(following_all)

    def logits_after(self, prefixes: np.ndarray) -> np.ndarray:
        return np.stack([logits_after(int(prefix), self.table.shape[1]) for prefix in prefixes])


def plain_output(prompt: Sequence[int], choose, length: int, vocab_size: int) -> list[int]:
    """Return what a request must produce: ``choose(logits, position)`` token by token, without an engine."""
    prefix = START
    for token in prompt:
        prefix = following(prefix, token)
    out: list[int] = []
    while len(out) < length:
        out.append(int(choose(logits_after(prefix, vocab_size), len(prompt) + len(out))))
        prefix = following(prefix, out[-1])
    return out


class LetterTokenizer:
    """Token 0 is special; token i is the i-th letter from "a"; a few tokens are half a character."""

    HALVES = (20, 21)  # two of them in a row make "é"
    special_token_ids: ClassVar[dict[str, int]] = {"<end>": 0}

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        return [ord(c) - 96 for c in text.lower() if c.isalpha()]

    def token_bytes(self, token_id: int) -> bytes:
        return {0: b"<end>", 20: b"\xc3", 21: b"\xa9"}.get(token_id, bytes([96 + token_id]))

    def detokenizer(self, skip_special_tokens: bool = True, *, prompt: Sequence[int] = (), **options):
        made = _Letters(skip_special_tokens)
        made.push([int(t) for t in prompt])
        made.is_of_prompt = made.half
        return made


class _Letters:
    def __init__(self, skip: bool) -> None:
        self.skip, self.half, self.is_of_prompt = skip, False, False

    def push(self, token_ids) -> str:
        out = ""
        for t in token_ids:
            if t in LetterTokenizer.HALVES:
                out, self.half, self.is_of_prompt = out + ("é" if self.half else ""), not self.half, False
            elif t == 0:
                out += "" if self.skip else "<end>"
            else:
                out += chr(96 + t)
        return out

    def finish(self) -> str:
        half, self.half = self.half and not self.is_of_prompt, False
        return "\ufffd" if half else ""
