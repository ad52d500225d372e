"""A tokenizer in the form that llguidance reads: the bytes of each token, and the tokens of a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

GUARD = "\x02"  # no vocabulary merges it with the text after it


class TokenizerBytes(Protocol):
    """The methods of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_token_ids(self) -> Mapping[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Vocabulary:
    """The tokens of a model. vocab_size: the number of its logits; ids above the tokenizer's have no bytes and are
    never allowed.

    The attributes are those that `llguidance.TokenizerWrapper` reads.
    """

    bos_token_id = None

    def __init__(self, tokenizer: TokenizerBytes, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.special_tokens = {text: i for text, i in tokenizer.special_token_ids.items() if i < vocab_size}
        self.special_token_ids = sorted(self.special_tokens.values())
        self.eos_token_ids = sorted(eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else self.tokens.index(b"")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text as they occur inside a longer text, with exactly the bytes of the text; none if
        the tokenizer has no such tokens.

        The text is tokenized after a guard, so that a vocabulary that adds a space before every text adds it before the
        guard.
        """
        wanted = text.encode()
        for prefix in ("", GUARD):
            tokens = self._tokenizer.encode(prefix + text, add_special_tokens=False)
            start = self._end_of(prefix.encode(), tokens)
            if self.bytes_of(tokens[start:]) == wanted:
                return tokens[start:]
        return []

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in tokens])

    def _end_of(self, prefix: bytes, tokens: Sequence[int]) -> int:
        """Return the smallest number of tokens whose text ends with the prefix."""
        found, count = b"", 0
        while not found.endswith(prefix) and count < len(tokens):
            found += self.tokens[tokens[count]]
            count += 1
        return count
