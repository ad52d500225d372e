"""Vocabularies of tiktoken: files of lines with the bytes of a token in base64, a space and its rank.

A word that is a token stays whole; else the neighbours are merged whose joint bytes have the lowest rank, until none
have one. The ranks are the token ids.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from foreword.errors import ModelError
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.detokenizer import BYTE_OF
from foreword.models.files import FETCH_AGAIN
from foreword.models.pre_tokenizers import PRESETS
from foreword.models.text_files import read_bytes
from foreword.models.tokenizer_config import added_tokens

RANKS_FILE = "tiktoken.model"
_NUM_RESERVED = 256
"""Special tokens behind the ranks, with or without a name in tokenizer_config.json."""
_CLASS = "tokenization_kimi.TikTokenTokenizer"
"""The class of the models' own code for which the pattern of words is known."""
_CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


def read_ranks(path: Path, config: Config) -> Tokenizer:
    """Return the backend of a directory of Kimi with this file and this tokenizer_config.json. Raise ModelError for a
    damaged file, and for another class of tokenizer.
    """
    classes = config.value("auto_map")
    own = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    if _CLASS not in (own if isinstance(own, list) else [own]):
        reason = f"auto_map is {classes!r:.80}, and {RANKS_FILE} is supported with the tokenizer {_CLASS} alone"
        raise config.error(reason, "Give a directory with tokenizer.json")
    tokens = _tokens(path)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    # In the order of the ranks of what they make.
    merges = [(_text(token[:n]), _text(token[n:])) for token in tokens for n in _splits(token, ids)]
    vocabulary = {_text(token): token_id for token, token_id in ids.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = PRESETS["kimi-k2"].pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    named = dict(added_tokens(config))
    for token_id in range(len(tokens), len(tokens) + _NUM_RESERVED):
        token = named.get(token_id, AddedToken(f"<|reserved_token_{token_id}|>", normalized=False))
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            reason = f"added_tokens_decoder gives {token.content!r:.80} the id {token_id}, and it has another"
            raise config.error(reason, USE_ITS_CONFIG)
    return backend


def _tokens(path: Path) -> list[bytes]:
    """Return the tokens in the order of their ranks, which are the numbers from 0."""
    found: dict[int, bytes] = {}
    lines = read_bytes(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            text, rank = line.split()
            found[int(rank)] = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            reason = f"line {number} is {line!r:.80}, not a token in base64 and its rank"
            raise ModelError(f"{path}: {reason}. {FETCH_AGAIN}") from None
    tokens = [found.get(rank, b"") for rank in range(len(lines))]
    is_whole = len(set(tokens)) == len(tokens) and b"" not in tokens
    if not is_whole or not {bytes([byte]) for byte in range(256)} <= set(tokens):
        reason = "the ranks are not those from 0 of different tokens, among them every byte"
        raise ModelError(f"{path}: {reason}. {FETCH_AGAIN}")
    return tokens


def _splits(token: bytes, ids: dict[bytes, int]) -> list[int]:
    """Return where a token can be split in two tokens, the split of the lowest ranks first."""
    found = [n for n in range(1, len(token)) if token[:n] in ids and token[n:] in ids]
    return sorted(found, key=lambda n: (ids[token[:n]], ids[token[n:]]))


def _text(token: bytes) -> str:
    return "".join(map(_CHAR_OF.__getitem__, token))
