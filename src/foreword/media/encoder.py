"""Convert a text with images and sounds to the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foreword.arrays import F32, I32, Bools
from foreword.media.limits import MediaLimits

if TYPE_CHECKING:
    from foreword.media.parts import Medium
    from foreword.media.speech import Speech


class MediaPrompt(NamedTuple):
    """A prompt of T positions, some of them vectors.

    token_ids: of all positions, with the model's placeholders. is_token: bool [T], False at vectors. embeds: [T,
    hidden], zero at tokens. positions: int32 [dims, T] of M-RoPE; None without. mrope_delta: what later ones add.
    """

    token_ids: list[int]
    is_token: Bools
    embeds: F32
    positions: I32 | None
    mrope_delta: int


class MediaEncoder(Protocol):
    """A model's encoders of images and sounds. May be used by several threads."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Each kind that the model takes, of "image" and "audio" → the text that stands for one in a prompt."""

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        """The inputs of a text with one placeholder per image and sound, in order. encode: of a text with all of them.

        RequestError for other placeholders, and for an image or sound that the model cannot take.
        """


@dataclass(frozen=True, slots=True)
class Media:
    """The media that a model takes besides text. encoder: None for text alone. refused: kind → why. speech: of
    transcribers.
    """

    encoder: MediaEncoder | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)
    speech: Speech | None = None

    def from_others(self) -> Media:
        """For messages of others, whose files of this machine are not read."""
        return replace(self, limits=replace(self.limits, local_files=False))


TEXT_ONLY = Media()
