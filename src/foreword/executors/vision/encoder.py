"""An encoder of images beside a decoder of Foreword: the arithmetic of `foreword.models.vision_spec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreword.arrays import F32, I32, I64, Bools
from foreword.errors import RequestError
from foreword.executors.functions import ACTIVATIONS, FloatWeights, layer_norm, rms_norm
from foreword.executors.image_options import OPTIONS, check_options
from foreword.executors.media_prompt import MediaCache, Places, check_num_vectors, expanded_text, vector_prompt
from foreword.executors.vision.processing import Size, num_vectors, patches_of, text_of, tiles_of
from foreword.media.encoder import MediaPrompt
from foreword.media.images import Image
from foreword.media.parts import Medium
from foreword.models.vision_files import LoadedVision
from foreword.models.vision_spec import VisionSpec


class Grid(NamedTuple):
    """The patches, or the vectors, of a tile."""

    rows: int
    columns: int


Tower = Callable[[F32, Grid], list[F32]]
"""Runs the layers of an encoder on tiles of a grid of patches: [n, patches, hidden] → the states after each of
feature_layers, and the last ones, each [n, patches, hidden].
"""


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
        self._loaded, self.spec = loaded, loaded.spec
        self._weight, self._tower = FloatWeights(loaded.weights), tower
        seeing_all = ("image",) if self.spec.sees_all else ()
        self._places = Places({"image": self.spec.prompt.placeholder}, {"image": loaded.token_id}, seeing_all)
        num_features = len(self.spec.feature_layers)
        self._width = self.spec.vector_size * (1 + num_features) + int(self.spec.sees_all or num_features > 0)
        self.cache = MediaCache(self._encode, cache_bytes)
        patch = self._weight("patch")
        frames = patch.sum(2) if self.spec.num_frames > 1 else patch
        self._patch: F32 = np.ascontiguousarray(frames.reshape(len(patch), -1).T)

    @property
    def placeholders(self) -> Mapping[str, str]:
        return self._places.texts

    def check_processing(self, values: Mapping[str, object]) -> None:
        check_options(values, self._loaded.processing.configured(OPTIONS), self._loaded.processing)

    def check_length(self, media: Sequence[Medium], max_tokens: int) -> None:
        check_num_vectors(media, lambda medium: num_vectors(*self._size_of(medium)), max_tokens)

    def expanded(self, text: str, media: Sequence[Medium]) -> str:
        return expanded_text(text, media, self._places, lambda medium: text_of(*self._size_of(medium)))

    def _size_of(self, medium: Medium) -> tuple[Size, VisionSpec]:
        image = _image(medium)
        return image.pixels.size, self._spec_of(image.processing)

    def _spec_of(self, processing: Mapping[str, object]) -> VisionSpec:
        """Return the spec for images with values of the processor of their own."""
        return self._loaded.processing.spec(processing) if processing else self.spec

    def prompt(self, text: str, media: Sequence[Medium], encode: Callable[[str], list[int]]) -> MediaPrompt:
        found = vector_prompt(text, media, self._places, self.cache, encode, lambda: self._width)
        if not self.spec.is_placed:
            return MediaPrompt(found.token_ids, found.is_token, found.embeds, None, 0)
        positions, delta = placed_positions(found.is_token, [one.grid for one in found.encoded])
        positions = positions[: self._loaded.num_axes]
        return MediaPrompt(found.token_ids, found.is_token, found.embeds, positions, delta)

    def vectors(self, pixels: F32) -> F32:
        """Return the vectors of tiles [n, 3, height, width] with their features, float32 [n, vectors of each,
        vector_size · (1 + features)].
        """
        spec, (n, _, height, width) = self.spec, pixels.shape
        grid = Grid(height // spec.patch_size, width // spec.patch_size)
        patches = patches_of(pixels, spec.patch_size)
        x = (2 * patches - 1 if spec.is_centred else patches) @ self._patch
        if spec.num_positions:
            x = x + self._positions(grid)
            x = x if spec.placing == "axes" else x + self._weight("patch_bias")
        f, hidden = spec.factor, spec.tower.hidden_size
        *between, last = (
            states.reshape(n, grid.rows // f, f, grid.columns // f, f, hidden)
            for states in self._tower(np.ascontiguousarray(x, np.float32), grid)
        )
        features = [self._features(k, squares) for k, squares in enumerate(between)]
        return np.concatenate([self._projected(last), *features], -1)

    def _projected(self, squares: F32) -> F32:
        """Turn [n, rows, factor, columns, factor, hidden] into [n, rows · columns, vector_size]."""
        spec, n = self.spec, len(squares)
        f, hidden = spec.factor, spec.tower.hidden_size
        if spec.projector == "pool":
            pooled = np.asarray(squares.mean((2, 4)).reshape(n, -1, hidden), np.float32)
            normed = rms_norm(pooled, spec.tower.norm_eps) * self._weight("proj_norm")
            return np.asarray(normed @ self._weight("proj"), np.float32)
        if spec.projector == "unit_pool":
            pooled = np.asarray(squares.mean((2, 4)).reshape(n, -1, hidden), np.float32) * np.float32(hidden**0.5)
            if spec.standardizes:
                pooled = (pooled - self._weight("std_bias")) * self._weight("std_scale")
            return np.asarray(rms_norm(pooled, spec.tower.norm_eps) @ self._weight("proj").T, np.float32)
        joined = squares.swapaxes(2, 3).reshape(n, -1, f * f * hidden)
        if spec.projector == "shuffle":
            return np.asarray(joined @ self._weight("proj").T, np.float32)
        if spec.mlp.norm_eps is not None:
            weight, bias = self._weight("proj_norm"), self._weight("proj_norm_bias")
            joined = layer_norm(joined, weight, bias, spec.mlp.norm_eps)
        return self._mlp(joined, "")

    def _features(self, k: int, squares: F32) -> F32:
        """Return the features of a layer of the decoder, of the same shapes."""
        joined = squares.swapaxes(2, 3).reshape(len(squares), -1, self._weight(f"features.{k}.norm").shape[0])
        weight, bias = (self._weight(f"features.{k}.{name}") for name in ("norm", "norm_bias"))
        return self._mlp(layer_norm(joined, weight, bias, self.spec.tower.norm_eps), f"features.{k}.")

    def _mlp(self, joined: F32, prefix: str) -> F32:
        inner = ACTIVATIONS[self.spec.mlp.activation](self._product(joined, f"{prefix}proj"))
        return self._product(inner, f"{prefix}out")

    def _product(self, x: F32, name: str) -> F32:
        """Return the product with a weight of the projector, and its bias."""
        found = x @ self._weight(name).T
        return np.asarray(found + self._weight(f"{name}_bias") if self.spec.mlp.has_bias else found, np.float32)

    def _positions(self, grid: Grid) -> F32:
        """Return the positions of the patches of a tile, [rows · columns, hidden]."""
        table, side = self._weight("positions"), round(self.spec.num_positions**0.5)
        if self.spec.placing == "axes":
            by_column, by_row = table[0, : grid.columns], table[1, : grid.rows]
            return (by_row[:, None] + by_column).reshape(-1, table.shape[2])
        if self.spec.placing == "resized":
            rows, columns = (resizing(count, side) for count in grid)
            by_rows = (rows @ table.reshape(side, -1)).reshape(grid.rows, side, -1)
            return np.asarray((columns @ by_rows).reshape(-1, table.shape[1]), np.float32)
        if self.spec.placing != "linear":
            return table[position_ids(self.spec, grid)]
        found = np.zeros((grid.rows, grid.columns, table.shape[1]), np.float32)
        for row, of_row in _taps(grid.rows, side):
            for column, of_column in _taps(grid.columns, side):
                found += table[np.add.outer(row * side, column)] * np.multiply.outer(of_row, of_column)[..., None]
        return found.reshape(-1, table.shape[1])

    def _encode(self, medium: Medium) -> EncodedImage:
        size, spec = self._size_of(medium)
        tiles = tiles_of(_image(medium).pixels, spec)
        vectors = np.concatenate([self.vectors(tile[None])[0] for tile in tiles])
        height, width = tiles[-1].shape[1:]
        grid = Grid(*(pixels // spec.patch_size // spec.factor for pixels in (height, width)))
        return EncodedImage(text_of(size, spec), np.ascontiguousarray(vectors, np.float32), grid)


def _image(medium: Medium) -> Image:
    """Raise RequestError for a medium of another kind."""
    if not isinstance(medium, Image):
        reason = "the model takes images alone"
        raise RequestError(None, medium.field, medium.size, reason, "Leave it out, or use another model.")
    return medium


def position_ids(spec: VisionSpec, grid: Grid) -> I64:
    """Return the row of the table of positions of each patch of a tile, int64 [rows · columns]."""
    if spec.placing == "rows":
        return np.arange(grid.rows * grid.columns)
    side = round(spec.num_positions**0.5)
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def along(count: int) -> I64:
        at = np.minimum(np.arange(count, dtype=np.float32) * np.float32(1 / count), np.float32(1 - 1e-6))
        return np.asarray(np.searchsorted(bounds, at, side="right"), np.int64)

    ids: I64 = np.add.outer(along(grid.rows) * side, along(grid.columns)).ravel()
    return ids


def _taps(count: int, side: int) -> list[tuple[I64, F32]]:
    """Return the two entries around each of ``count`` places along a side, first on first and last on last, with their
    weights.
    """
    at = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    below = np.floor(at)
    first = below.astype(np.int64)
    return [(first, 1 - (at - below)), (np.minimum(first + 1, side - 1), at - below)]


def resizing(count: int, side: int) -> F32:
    """Return the weights of ``side`` entries in each of ``count`` places along the same length, [count, side].

    They fall linearly with the distance from the middle of a place, to 0 at the distance of an entry or, if that is
    longer, of a place, and have the sum 1: PyTorch's bilinear interpolation with antialias.
    """
    step = side / count
    middles = (np.arange(count) + 0.5) * step
    distances = np.abs(np.arange(side) + 0.5 - middles[:, None])
    weights = np.maximum(0, 1 - distances / max(step, 1))
    found: F32 = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return found


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
