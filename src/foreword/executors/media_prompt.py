"""The common part of encoders of images and sounds: prompts with their vectors, and a cache of these."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from foreword.arrays import F32, I64, Bools
from foreword.errors import ContextLengthError
from foreword.media.encoder import PlaceError
from foreword.media.parts import Medium


class Encoded(Protocol):
    """A medium for the decoder. text: its placeholders, and what stands between them. vectors: one for each
    placeholder, [N, width].
    """

    @property
    def text(self) -> str: ...

    @property
    def vectors(self) -> F32: ...


E = TypeVar("E", bound=Encoded)


class MediaCache(Generic[E]):
    """Keeps encoded media by content, the last used ones, up to ``max_bytes`` of vectors; what alone is larger is not
    kept. Several threads may use it; one at a time encodes, while the others find what is kept.
    """

    def __init__(self, encode: Callable[[Medium], E], max_bytes: int) -> None:
        self._encode, self._max_bytes = encode, max_bytes
        self._kept: OrderedDict[str, E] = OrderedDict()
        self._lock, self._encoding = threading.Lock(), threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the vectors that are kept."""
        with self._lock:
            return self._used()

    def encoded(self, medium: Medium) -> E:
        """Return a medium encoded, now or before. Errors are those of ``encode``."""
        digest = medium.digest
        if (found := self.find(digest)) is not None:
            return found
        with self._encoding:
            if (found := self.find(digest)) is None:  # another thread may have encoded it meanwhile
                found = self._encode(medium)
                self._keep(digest, found)
        return found

    def find(self, digest: str) -> E | None:
        """Return what is kept of a medium."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def _keep(self, digest: str, found: E) -> None:
        spare = self._max_bytes - found.vectors.nbytes
        if spare < 0:
            return
        with self._lock:
            used = self._used()
            while used > spare:
                used -= self._kept.popitem(last=False)[1].vectors.nbytes
            self._kept[digest] = found

    def _used(self) -> int:
        return sum(one.vectors.nbytes for one in self._kept.values())


class Places(NamedTuple):
    """The places of media in prompts, by kind. texts: the placeholder of a medium. token_ids: of the tokens that have
    vectors. seeing_all: kinds of media whose vectors see each other.
    """

    texts: Mapping[str, str]
    token_ids: Mapping[str, int]
    seeing_all: Collection[str]


class VectorPrompt(NamedTuple, Generic[E]):
    """A prompt of T positions: its token ids, where they are read, the vectors elsewhere [T, width], and the encoded
    media in order.
    """

    token_ids: list[int]
    is_token: Bools
    embeds: F32
    encoded: list[E]


def vector_prompt(
    text: str,
    media: Sequence[Medium],
    places: Places,
    cache: MediaCache[E],
    encode: Callable[[str], list[int]],
    width: Callable[[], int],
) -> VectorPrompt[E]:
    """Return the prompt of a text with a placeholder per medium.

    encode: tokenizes a text. width: of the vectors, asked for when the media are encoded; those that are shorter are
    filled up with zeros, and the last value is how many vectors follow, where they see each other.
    Raise PlaceError if the placeholders do not fit the media.
    """
    pieces = _pieces(text, media, places)
    encoded = [cache.encoded(medium) for medium in media]
    pieces[1::2] = [one.text for one in encoded]
    token_ids = encode("".join(pieces))
    is_token = ~np.isin(np.array(token_ids, np.int32), list(places.token_ids.values()))
    vectors = np.concatenate([one.vectors for one in encoded])
    if len(vectors) != np.count_nonzero(~is_token):
        reason = f"the prompt has {np.count_nonzero(~is_token)} places for {len(vectors)} vectors"
        raise PlaceError(None, "messages", f"{len(media)} parts", reason, "Check the text of the messages.")
    embeds = np.zeros((len(token_ids), width()), np.float32)
    embeds[~is_token, : vectors.shape[1]] = vectors
    for kind in places.seeing_all:
        embeds[:, -1] += _following(np.array(token_ids) == places.token_ids[kind])
    return VectorPrompt(token_ids, is_token, embeds, encoded)


def expanded_text(text: str, media: Sequence[Medium], places: Places, text_of: Callable[[Medium], str]) -> str:
    """Return a text with those of its media in place of their placeholders. Raise PlaceError as `vector_prompt`."""
    pieces = _pieces(text, media, places)
    pieces[1::2] = map(text_of, media)
    return "".join(pieces)


def _pieces(text: str, media: Sequence[Medium], places: Places) -> list[str]:
    """Return the parts of a text, of which every second one is the placeholder of a medium."""
    kinds = {placeholder: kind for kind, placeholder in places.texts.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    here, given = [kinds[place] for place in pieces[1::2]], [medium.kind for medium in media]
    if here != given:
        reason = f"the prompt has places for {_counted(here)}, the messages have {_counted(given)}"
        fix = "Leave placeholders out of texts; the chat template must have a place for each image and sound."
        raise PlaceError(None, "messages", f"{len(given)} parts", reason, fix)
    return pieces


def check_num_vectors(media: Sequence[Medium], num_vectors: Callable[[Medium], int], max_tokens: int) -> None:
    """Raise ContextLengthError for the first medium whose vectors have no place after those before it."""
    before = 0
    for medium in media:
        own = num_vectors(medium)
        if before + own > max_tokens:
            others = f", and those before it {before}" if before else ""
            raise ContextLengthError(
                None,
                medium.field,
                medium.size,
                f"becomes {own} vectors{others}: max_model_len is {max_tokens}",
                f"Give {_SMALLER[medium.kind]}, or raise max_model_len if the model allows it.",
                num_tokens=before + own,
                longest=max_tokens,
                max_model_len=max_tokens,
            )
        before += own


_SMALLER = {"image": "a smaller image", "audio": "a shorter sound"}


def _following(marked: Bools) -> I64:
    """Return how many positions follow each one of a run of marked ones, up to its end; 0 elsewhere."""
    at = np.arange(len(marked))
    ends = np.minimum.accumulate(np.where(marked, len(marked), at)[::-1])[::-1]
    return np.where(marked, ends - 1 - at, 0)


def _counted(kinds: Sequence[str]) -> str:
    return " and ".join(f"{kinds.count(kind)} of {kind}" for kind in sorted(set(kinds))) or "none"
