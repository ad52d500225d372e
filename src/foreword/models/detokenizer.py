"""Turn token ids into text, at once or incrementally.

A token stands for bytes, not characters: one character may be spread over several tokens. The text is therefore

    text(ids) = UTF-8( b"".join(token_bytes[i] for i in ids) ), each maximal invalid part replaced by U+FFFD,

without the first space where the vocabulary puts one before every text ("▁Hello"). Streaming follows the same rule:
the pieces always join to the text decoded at once. A character that a prompt leaves incomplete belongs to the output
if the output completes it, else to the prompt, as U+FFFD.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from foreword import utf8
from foreword.errors import ModelError

# Byte-level vocabularies write a byte as one printable character: itself if printable, else the next from U+0100.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_HIDDEN)}


class TokenBytes:
    """``token_bytes[id]``: the bytes that a token adds to the text, b"" for an id outside the vocabulary.

    Supports the decoders of byte-level BPE, of SentencePiece with or without byte fallback, and of WordPiece;
    ModelError for any other. The bytes of each token are computed on first use and cached.
    """

    def __init__(self, backend: tokenizers.Tokenizer, repeated: Mapping[int, str] | None = None) -> None:
        """Take the texts ``repeated`` of ids that the backend lacks."""
        self._id_to_token, self._repeated = backend.id_to_token, repeated or {}
        self._added = backend.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._rule = _rule_of(decoder)

    @property
    def skips_first_space(self) -> bool:
        """Return whether the vocabulary writes a space before every text that is not part of it."""
        return self._rule.skips_first_space

    def added_text(self, token_id: int) -> bytes | None:
        """Return the text of an added token as it is, without a space before it; None for other tokens."""
        return self._added[token_id].content.encode() if token_id in self._added else None

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._added and self._rule.keeps_added_tokens:
            return self._added[token_id].content.encode()
        token = self._repeated.get(token_id) or self._id_to_token(token_id)
        return b"" if token is None else self._rule.to_bytes(token)


class Detokenizer:
    """Incremental decoding: ``"".join(pushes) + finish()`` equals the text of all tokens decoded at once.

    Each push costs O(its tokens) and emits complete characters only; up to 3 bytes of an incomplete one are kept for
    the next push. ``hidden`` tokens add nothing. ``continues`` keeps the first space, for text that follows a prompt.
    ``unfinished``: the beginning of a character that the prompt ends with.
    Without ``added_spaces`` an added token directly behind another one adds its own text, without a space before it.
    """

    __slots__ = ("_added_spaces", "_after_added", "_decoder", "_hidden", "_num_chars", "_skipped", "_token_bytes")

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        hidden: Collection[int] = (),
        continues: bool = False,
        added_spaces: bool = True,
        unfinished: bytes = b"",
    ) -> None:
        self._added_spaces, self._after_added = added_spaces, False
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decoder = utf8.decoder("replace")
        self._decoder.decode(unfinished)
        # What the text does not begin with: the sign of a character of the prompt that the output did not complete.
        self._skipped = utf8.INVALID if unfinished else " " if token_bytes.skips_first_space and not continues else ""
        self._num_chars = 0  # characters of the tokens of `places`

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the characters completed by these tokens, "" if none."""
        bytes_of, hidden = self._token_bytes.__getitem__ if self._added_spaces else self._joined, self._hidden
        return self._emit(self._decoder.decode(b"".join([bytes_of(i) for i in token_ids if i not in hidden])))

    def places(self, token_ids: Iterable[int]) -> list[int]:
        """Push tokens, and return the place of each: how many characters are before the one that it is part of; and in
        the end the place of a token that would follow and begin a character.

        A token of several characters is at the first of them, one that adds nothing at the character after it. The
        characters of all calls are counted, those of `push` are not.
        """
        bytes_of, found = self._token_bytes.__getitem__ if self._added_spaces else self._joined, []
        for token_id in token_ids:
            data = b"" if token_id in self._hidden else bytes_of(token_id)
            self._num_chars += len(self._emit(self._decoder.decode(data[:1])))
            is_complete = data and not self._decoder.getstate()[0]  # the first byte is the last one of its character
            found.append(max(0, self._num_chars - 1) if is_complete else self._num_chars)
            self._num_chars += len(self._emit(self._decoder.decode(data[1:])))
        return [*found, self._num_chars]

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else "". Call this after the last push."""
        return self._emit(self._decoder.decode(b"", True))

    def _joined(self, token_id: int) -> bytes:
        """Return the bytes of a token whose added neighbours have no space between them."""
        added, was_added = self._token_bytes.added_text(token_id), self._after_added
        self._after_added = added is not None
        return added if added is not None and was_added else self._token_bytes[token_id]

    def _emit(self, text: str) -> str:
        if self._skipped and text:
            text, self._skipped = text.removeprefix(self._skipped), ""
        return text


@dataclass(frozen=True, slots=True)
class _Rule:
    """The effect of a `tokenizers` decoder on each token. ``keeps_added_tokens``: added tokens are not decoded by
    it.
    """

    to_bytes: Callable[[str], bytes]
    skips_first_space: bool = False
    keeps_added_tokens: bool = False


def _rule_of(decoder: dict[str, Any] | None) -> _Rule:
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case [*_, "ByteLevel"] if all(step["type"] in ("ByteLevel", "Fuse") for step in steps):
            return _Rule(_byte_level, keeps_added_tokens=True)
        case ["WordPiece"]:
            return _Rule(_word_piece(steps[0]["prefix"], steps[0]["cleanup"]), skips_first_space=True)
        case [_, *_] as kinds if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return _sentence_piece(steps)
    kind = "no decoder" if decoder is None else f"the decoder {json.dumps(decoder)[:200]}"
    raise ModelError(
        f"the tokenizer has {kind}. Supported are ByteLevel, WordPiece, Metaspace and sequences of Replace, "
        "ByteFallback, Fuse and Strip; use a model with one of these"
    )


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()  # not in the byte alphabet: literal text


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if token.startswith(prefix):
            return token[len(prefix) :].encode()
        closes = cleanup and (token in (".", "?", "!", ",") or token in ("n't", "'m", "'s", "'ve", "'re"))
        return (token if closes else " " + token).encode()

    return to_bytes


def _sentence_piece(steps: list[dict[str, Any]]) -> _Rule:
    replacements: list[tuple[str, str]] = []
    byte_fallback = skips_first_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": mark, **rest}:
                replacements.append((mark, " "))
                skips_first_space |= rest.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                skips_first_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    f"the tokenizer decodes by {json.dumps(step)[:200]}, which is not supported. Use another model"
                )

    def to_bytes(token: str) -> bytes:
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return _Rule(to_bytes, skips_first_space)
