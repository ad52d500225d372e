"""What turns a text with images into the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from foreword.arrays import F32, I32, Bools
from foreword.media.images import Image
from foreword.media.limits import MediaLimits


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
    """A model's encoder of images. May be used by several threads."""

    @property
    def placeholder(self) -> str:
        """The text that stands for one image in a prompt."""
        ...

    def prompt(self, text: str, images: Sequence[Image], encode: Callable[[str], list[int]]) -> MediaPrompt:
        """The inputs of a text with one placeholder per image. encode: of a text that has all placeholders.

        RequestError for another number of placeholders, and for an image that the model cannot take.
        """
        ...


@dataclass(frozen=True, slots=True)
class Media:
    """What a model takes besides text. images: its encoder of images, or the reason why it takes none; "": it is a
    model of text.
    """

    images: MediaEncoder | str = ""
    limits: MediaLimits = field(default_factory=MediaLimits)

    def from_others(self) -> Media:
        """For messages of others, whose files of this machine are not read."""
        return replace(self, limits=replace(self.limits, local_files=False))


TEXT_ONLY = Media()
