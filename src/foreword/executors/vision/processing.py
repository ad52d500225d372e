"""From an image to the tiles that an encoder reads, with Pillow and NumPy: equal to the processors of transformers that
use Pillow, number for number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import F32
from foreword.models.vision_spec import ImageProcessing

Size = tuple[int, int]
"""Width and height."""


class Tiles(NamedTuple):
    """The tiles of an image, float32 [n, 3, tile_size, tile_size]: rows · columns of them, row by row, and one of all
    of it; without rows, one alone.
    """

    pixels: F32
    rows: int
    columns: int


def tiles_of(image: Any, processing: ImageProcessing) -> Tiles:
    """Return the tiles of an RGB image of Pillow."""
    size = processing.tile_size
    if processing.longest is not None:
        image = _resized(image, _longest_edge(image.size, processing.longest), processing)
    rows = columns = 0
    cut = []
    if processing.splits:
        image = _resized(image, _whole_tiles(image.size, size), processing)
        width, height = image.size
        if max(width, height) > size:
            rows, columns = height // size, width // size
            corners = [(column * size, row * size) for row in range(rows) for column in range(columns)]
            cut = [image.crop((x, y, x + size, y + size)) for x, y in corners]
    image = _resized(image, (size, size), processing)
    return Tiles(np.stack([_normalized(tile, processing) for tile in (*cut, image)]), rows, columns)


def patches_of(pixels: F32, patch_size: int) -> F32:
    """Return the patches of tiles [n, 3, S, S] as rows [n, (S / patch_size)², 3 · patch_size²], row by row."""
    n, channels, side, _ = pixels.shape
    grid = side // patch_size
    cut = pixels.reshape(n, channels, grid, patch_size, grid, patch_size)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3, 5)).reshape(n, grid * grid, -1)


def _longest_edge(size: Size, longest: int) -> Size:
    """Return the sizes in proportion whose longer one is ``longest``; the shorter one is even, and not 0."""
    width, height = size
    ratio = width / height
    other = int(longest / ratio if width >= height else longest * ratio)
    other = max(1, other + other % 2)
    return (longest, other) if width >= height else (other, longest)


def _whole_tiles(size: Size, tile: int) -> Size:
    """Return the sizes of whole tiles: the longer side first, then the shorter one in proportion to it."""

    def up(length: int) -> int:
        return -(-length // tile) * tile

    width, height = size
    ratio = width / height
    if width >= height:
        width = up(width)
        return width, up(int(width / ratio))
    height = up(height)
    return up(int(height * ratio)), height


def _resized(image: Any, size: Size, processing: ImageProcessing) -> Any:
    return image.resize(size, resample=processing.resample)


def _normalized(image: Any, processing: ImageProcessing) -> F32:
    """Return (pixel · scale − mean) / std, float32 [3, height, width]."""
    scaled = (np.asarray(image).transpose(2, 0, 1).astype(np.float64) * processing.scale).astype(np.float32)
    mean, std = (np.array(of, np.float32)[:, None, None] for of in (processing.mean, processing.std))
    found: F32 = (scaled - mean) / std
    return found
