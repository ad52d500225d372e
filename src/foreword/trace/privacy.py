"""Replace the token ids of a trace: plain, hashed or omitted (`foreword.trace.header.TokenIds`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from secrets import randbits, token_bytes
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.trace.events import Add, Commit, Correct, Event, Step, Tensor, Tokens, count_of, ids_of
from foreword.trace.header import TokenIds, TraceHeader

OF_TOKENS = ("input_ids", "draft_token_ids")
"""The tensors that hold token ids."""


class TokenCover:
    """Replaces the token ids of events. Texts and token ids of sampling parameters are left out, too."""

    def __init__(self, how: TokenIds, vocab_size: int) -> None:
        self._how, self._key = how, token_bytes(16)
        self._table: I64 | None = None
        if how == "hashed":  # 0 stays: it is also the id of padding and of unknown tokens
            others = np.random.default_rng(randbits(128)).permutation(vocab_size - 1) + 1
            self._table = np.concatenate([np.zeros(1, np.int64), others])

    def __call__(self, event: Event) -> Event:
        """Return the event with replaced token ids."""
        if self._how == "plain":
            return event
        match event:
            case Add():
                return replace(
                    event,
                    prompt_token_ids=self._tokens(event.prompt_token_ids),
                    output_token_ids=self._tokens(event.output_token_ids),
                    cache_salt=self._salt(event.cache_salt),
                    cache_miss=self._miss(event.cache_miss),
                    extras=_without_content(event.extras),
                )
            case Correct(token_ids=(at, ids)):
                return replace(event, token_ids=(at, self._tokens(ids)))
            case Step():
                drafts = {req_id: self._tokens(ids) for req_id, ids in event.draft_tokens.items()}
                tensors = {n: self._tensor(v) if n in OF_TOKENS else v for n, v in event.tensors.items()}
                if self._table is None:
                    tensors = {n: v for n, v in tensors.items() if n not in OF_TOKENS}
                return replace(event, draft_tokens=drafts, tensors=tensors)
            case Commit():
                return replace(event, tokens={req_id: self._tokens(ids) for req_id, ids in event.tokens.items()})
        return event

    def _salt(self, salt: str | None) -> str | None:
        """Return a name that only equal salts of this trace have."""
        if salt is None or self._how == "omitted":
            return None
        return blake2b(salt.encode("utf-8", "surrogatepass"), key=self._key, digest_size=8).hexdigest()

    def _miss(self, miss: str) -> str:
        """Return the reason of a cache miss without the fact that another salt has equal content, which only the
        operator may know.
        """
        return miss.replace("salt ", "never_computed ") if self._how == "omitted" else miss

    def _tokens(self, ids: Tokens) -> Tokens:
        if self._table is None or isinstance(ids, int):
            return count_of(ids)
        array = np.asarray(ids_of(ids), np.int64)
        return np.where(array < 0, array, self._table[array])

    def _tensor(self, value: Tensor) -> Tensor:
        return value if self._table is None or isinstance(value, int | str) else self._tokens(np.asarray(value))


def _without_content(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the parameters alone: texts and lists may hold what a user wrote."""
    return {
        name: {key: number for key, number in value.items() if isinstance(number, int | float)}
        for name, value in extras.items()
        if isinstance(value, dict)
    }


def cover_of(header: TraceHeader) -> TokenCover:
    """Return the object that replaces the token ids of a trace with this header."""
    return TokenCover(header.token_ids, header.vocab_size)
