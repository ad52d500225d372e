"""Convert a text with images and sounds to the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foreword.arrays import F32, I32, Bools
from foreword.errors import RequestError
from foreword.media.limits import MediaLimits

if TYPE_CHECKING:
    from foreword.media.parts import Medium
    from foreword.media.speech import Speech


class PlaceError(RequestError):
    """The placeholders in the text of a prompt do not fit its images and sounds."""


class MediaPrompt(NamedTuple):
    """A prompt of T positions, some of which are vectors.

    token_ids: the ids at all positions, with the model's placeholders at vectors. is_token: bool [T], False at vectors.
    embeds: [T, hidden], zero at tokens. positions: int32 [dims, T], the M-RoPE positions, or None. mrope_delta: the
    number that is added to later positions.
    """

    token_ids: list[int]
    is_token: Bools
    embeds: F32
    positions: I32 | None
    mrope_delta: int


class MediaEncoder(Protocol):
    """A model's encoders of images and sounds. Several threads may use it."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Return the kinds that the model takes ("image", "audio"), each with the text of its placeholder in a
        prompt.
        """

    def check_processing(self, values: Mapping[str, object]) -> None:
        """Raise RequestError for values of the processor of images that the model does not follow."""

    def check_length(self, media: Sequence[Medium], max_tokens: int) -> None:
        """Raise ContextLengthError for media that become more vectors than max_tokens, before any is encoded: for the
        first that has no place after those before it.
        """

    def expanded(self, text: str, media: Sequence[Medium]) -> str:
        """Return a text with one placeholder per image and sound as `prompt` tokenizes it, without encoding any. Errors
        are those of `prompt`.
        """

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        """Return the inputs for a text with one placeholder per image and sound, in order. encode: tokenizes a text
        with the expanded placeholders.

        Raise PlaceError if the placeholders do not fit the media; RequestError if the model cannot take an image or
        sound.
        """


@dataclass(frozen=True, slots=True)
class Media:
    """The media that a model takes besides text. encoder: None if it takes only text. refused: the reason by kind.
    speech: for models that transcribe.
    """

    encoder: MediaEncoder | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)
    speech: Speech | None = None

    def from_others(self) -> Media:
        """Return the media for messages of remote clients, which may not read files of this machine."""
        return replace(self, limits=replace(self.limits, local_files=False))


PROCESSING = "mm_processor_kwargs"
"""The option of a conversation with values for the model's processor of images."""
TEXT_ONLY = Media()
