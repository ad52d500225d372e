"""A tokenizer of all bytes and a few longer tokens, and grammars over it."""

from __future__ import annotations

import codecs
from typing import ClassVar

import numpy as np

from foreword.batch import SamplingParams
from foreword.sampling import Grammar
from foreword.structured import GrammarCompiler

LONGER = ['{"', '"}', '": ', '": "', '", "', ", ", "name", "age", "true", "false", "red", "re", "ed", "blue", "yes",
          "no", "</", "think", ">", "</think>", "ab", "abc", " yes", ">\n"]  # fmt: skip
END, OTHER = 0, 1
TOKENS = [b"<end>", b"<other>", *(bytes([byte]) for byte in range(256)), *(text.encode() for text in LONGER)]
IDS = {data: token for token, data in enumerate(TOKENS) if token > 1}
LONGEST = max(map(len, IDS))
V = len(TOKENS) + 11  # a model's logits may be wider


class BytesTokenizer:
    """Takes the longest token at each place."""

    vocab_size = len(TOKENS)
    special_token_ids: ClassVar[dict[str, int]] = {"<end>": END, "<other>": OTHER}

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id] if token_id < len(TOKENS) else b""

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        data, found, at = text.encode(), [], 0
        while at < len(data):
            length = next(n for n in range(LONGEST, 0, -1) if data[at : at + n] in IDS)
            found.append(IDS[data[at : at + length]])
            at += length
        return found

    def detokenizer(self, skip_special_tokens: bool = True, *, continues: bool = False, **options: bool):
        return _Text(self.special_token_ids.values() if skip_special_tokens else ())


class _Text:
    def __init__(self, hidden) -> None:
        self.hidden, self.decoder = hidden, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids) -> str:
        return self.decoder.decode(b"".join(TOKENS[t] for t in token_ids if t not in self.hidden and t < len(TOKENS)))

    def finish(self) -> str:
        return self.decoder.decode(b"", True)


def make_compiler(**options: int) -> GrammarCompiler:
    return GrammarCompiler(BytesTokenizer(), vocab_size=V, eos_token_ids=[END], **options)


COMPILER = make_compiler()


def grammar(structured_outputs=None, *, compiler: GrammarCompiler = COMPILER, **params) -> Grammar:
    made = compiler.grammar("a", SamplingParams(structured_outputs=structured_outputs, **params))
    assert made is not None
    return made


def allowed(grammar: Grammar) -> set[int]:
    """The tokens of its mask."""
    words = np.full(-(-V // 32), -1, np.int32)
    grammar.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:V]).tolist())
