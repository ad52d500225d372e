"""An encoder of images beside a decoder of Foreword: the arithmetic of `foreword.models.vision_spec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreword.arrays import F32, I32, I64, Bools
from foreword.errors import RequestError
from foreword.executors.functions import ACTIVATIONS, FloatWeights, rms_norm
from foreword.executors.media_prompt import MediaCache, Places, vector_prompt
from foreword.executors.vision.processing import patches_of, tiles_of
from foreword.media.encoder import MediaPrompt
from foreword.media.images import Image
from foreword.media.parts import Medium
from foreword.models.vision_files import LoadedVision
from foreword.models.vision_spec import VisionSpec


class Grid(NamedTuple):
    """The patches, or the vectors, of a tile."""

    rows: int
    columns: int


Tower = Callable[[F32, Grid], F32]
"""Runs the layers of an encoder on tiles of a grid of patches: [n, patches, hidden] → [n, patches, hidden]."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """Implements `Encoded`. grid: of the vectors of its last tile."""

    text: str
    vectors: F32
    grid: Grid


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
        patch = self._weight("patch")
        frames = patch.sum(2) if self.spec.num_frames > 1 else patch
        self._patch: F32 = np.ascontiguousarray(frames.reshape(len(patch), -1).T)

    @property
    def placeholders(self) -> Mapping[str, str]:
        return self._places.texts

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        found = vector_prompt(text, media, self._places, self.cache, encode, lambda: self._width)
        if not self.spec.is_placed:
            return MediaPrompt(found.token_ids, found.is_token, found.embeds, None, 0)
        placed = placed_positions(found.is_token, [one.grid for one in found.encoded])
        return MediaPrompt(found.token_ids, found.is_token, found.embeds, *placed)

    def vectors(self, pixels: F32) -> F32:
        """Return the vectors of tiles [n, 3, height, width], float32 [n, vectors of each, vector_size]."""
        spec, (n, _, height, width) = self.spec, pixels.shape
        grid = Grid(height // spec.patch_size, width // spec.patch_size)
        x = patches_of(pixels, spec.patch_size) @ self._patch
        if spec.num_positions:
            x = x + self._weight("patch_bias") + self._weight("positions")[position_ids(spec, grid)]
        f, hidden = spec.factor, spec.tower.hidden_size
        squares = self._tower(np.ascontiguousarray(x, np.float32), grid).reshape(
            n, grid.rows // f, f, grid.columns // f, f, hidden
        )
        if spec.projector == "pool":
            pooled = np.asarray(squares.mean((2, 4)).reshape(n, -1, hidden), np.float32)
            normed = rms_norm(pooled, spec.tower.norm_eps) * self._weight("proj_norm")
            return np.asarray(normed @ self._weight("proj"), np.float32)
        joined = squares.swapaxes(2, 3).reshape(n, -1, f * f * hidden) @ self._weight("proj").T
        if spec.projector == "mlp":
            inner = ACTIVATIONS["gelu"](np.asarray(joined + self._weight("proj_bias"), np.float32))
            joined = inner @ self._weight("out").T + self._weight("out_bias")
        return np.asarray(joined, np.float32)

    def _encode(self, medium: Medium) -> EncodedImage:
        if not isinstance(medium, Image):
            reason = "the model takes images alone"
            raise RequestError(None, medium.field, medium.size, reason, "Leave it out, or use another model.")
        spec = self.spec
        tiles = tiles_of(medium.pixels, spec)
        vectors = np.concatenate([self.vectors(tile[None])[0] for tile in tiles.pixels])
        height, width = tiles.pixels.shape[2:]
        text = spec.prompt.text(tiles.rows, tiles.columns, spec.num_vectors(width, height))
        side = spec.patch_size * spec.factor
        return EncodedImage(text, np.ascontiguousarray(vectors, np.float32), Grid(height // side, width // side))


def position_ids(spec: VisionSpec, grid: Grid) -> I64:
    """Return the row of the table of positions of each patch of a tile, int64 [rows · columns]."""
    if not spec.is_fractional:
        return np.arange(grid.rows * grid.columns)
    side = round(spec.num_positions**0.5)
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def along(count: int) -> I64:
        at = np.minimum(np.arange(count, dtype=np.float32) * np.float32(1 / count), np.float32(1 - 1e-6))
        return np.asarray(np.searchsorted(bounds, at, side="right"), np.int64)

    ids: I64 = np.add.outer(along(grid.rows) * side, along(grid.columns)).ravel()
    return ids


def placed_positions(is_token: Bools, grids: Sequence[Grid]) -> tuple[I32, int]:
    """Return the rotary positions of a prompt, int32 [3, T], and what is added to those of later tokens.

    A token has the next position in all three. With p the next one, the vector at row r and column c of an image has
    (p, p + r, p + c); the position after the image is p + the longer side of its grid.
    """
    positions = np.zeros((3, len(is_token)), np.int32)
    at = following = 0
    for grid in grids:
        first = at + int(np.argmin(is_token[at:]))
        positions[:, at:first] = np.arange(following, following + first - at)
        following, count = following + first - at, grid.rows * grid.columns
        places = np.divmod(np.arange(count), grid.columns)
        positions[:, first : first + count] = following + np.stack([np.zeros(count, np.int64), *places])
        at, following = first + count, following + max(grid)
    positions[:, at:] = np.arange(following, following + len(is_token) - at)
    return positions, following - at
