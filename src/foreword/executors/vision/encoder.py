"""An encoder of images beside a decoder of Foreword: the arithmetic of `foreword.models.vision_spec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, I64
from foreword.errors import RequestError
from foreword.executors.functions import FloatWeights, rms_norm
from foreword.executors.media_prompt import MediaCache, Places, vector_prompt
from foreword.executors.vision.processing import patches_of, tiles_of
from foreword.media.encoder import MediaPrompt
from foreword.media.images import Image
from foreword.media.parts import Medium
from foreword.models.vision_files import LoadedVision
from foreword.models.vision_spec import VisionSpec

Tower = Callable[[F32], F32]
"""Runs the layers of an encoder on tiles: [n, patches, hidden] → [n, patches, hidden]."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """Implements `Encoded`."""

    text: str
    vectors: F32


class ImageEncoder:
    """Implements `MediaEncoder`. Vectors are kept by content, up to cache_bytes.

    tower: runs the layers of the encoder, by one thread at a time. The rest is computed with NumPy in float32.
    """

    def __init__(self, loaded: LoadedVision, tower: Tower, cache_bytes: int) -> None:
        self.spec, self._weight, self._tower = loaded.spec, FloatWeights(loaded.weights), tower
        seeing_all = ("image",) if self.spec.sees_all else ()
        self._places = Places({"image": self.spec.prompt.placeholder}, {"image": loaded.token_id}, seeing_all)
        self._width = self.spec.vector_size + self.spec.sees_all
        self.cache = MediaCache(self._encode, cache_bytes)
        ids = position_ids(self.spec)
        self._positions: F32 = self._weight("positions")[ids]

    @property
    def placeholders(self) -> Mapping[str, str]:
        return self._places.texts

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        found = vector_prompt(text, media, self._places, self.cache, encode, lambda: self._width)
        return MediaPrompt(found.token_ids, found.is_token, found.embeds, None, 0)

    def vectors(self, pixels: F32) -> F32:
        """Return the vectors of tiles [n, 3, tile_size, tile_size], float32 [n, num_vectors, vector_size]."""
        spec, hidden = self.spec, self.spec.tower.hidden_size
        patches = patches_of(pixels, spec.patch_size)
        x = patches @ self._weight("patch").reshape(hidden, -1).T + self._weight("patch_bias") + self._positions
        squares = self._tower(np.ascontiguousarray(x, np.float32)).reshape(
            len(x), spec.grid // spec.factor, spec.factor, spec.grid // spec.factor, spec.factor, hidden
        )
        if spec.projector == "shuffle":
            joined = squares.swapaxes(2, 3).reshape(len(x), spec.num_vectors, -1)
            return np.asarray(joined @ self._weight("proj").T, np.float32)
        pooled = squares.mean((2, 4)).reshape(len(x), spec.num_vectors, hidden)
        normed = rms_norm(np.asarray(pooled, np.float32), spec.tower.norm_eps) * self._weight("proj_norm")
        return np.asarray(normed @ self._weight("proj"), np.float32)

    def _encode(self, medium: Medium) -> EncodedImage:
        if not isinstance(medium, Image):
            reason = "the model takes images alone"
            raise RequestError(None, medium.field, medium.size, reason, "Leave it out, or use another model.")
        tiles = tiles_of(medium.pixels, self.spec.processing)
        vectors = np.concatenate([self.vectors(tile[None])[0] for tile in tiles.pixels])
        text = self.spec.prompt.text(tiles.rows, tiles.columns, self.spec.num_vectors)
        return EncodedImage(text, np.ascontiguousarray(vectors, np.float32))


def position_ids(spec: VisionSpec) -> I64:
    """Return the row of the table of positions of each patch of a tile, int64 [grid²]."""
    if not spec.is_fractional:
        return np.arange(spec.grid**2)
    side = round(spec.num_positions**0.5)
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    at = np.minimum(np.arange(spec.grid, dtype=np.float32) * np.float32(1 / spec.grid), np.float32(1 - 1e-6))
    along = np.searchsorted(bounds, at, side="right")
    ids: I64 = np.add.outer(along * side, along).ravel()
    return ids
