"""Turn an image into the tiles that an encoder reads, with Pillow and NumPy: equal to the processors of transformers
that use Pillow, number for number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import F32
from foreword.models.vision_spec import AreaProcessing, CropProcessing, Normalization, TileProcessing, VisionSpec

Size = tuple[int, int]
"""Width and height."""


class Division(NamedTuple):
    """The division of an image into tiles of a size: rows · columns of them, row by row, and one of all of it, which
    comes before its crops and after its tiles; without rows, one alone. num_vectors: the vectors of each tile.
    """

    rows: int
    columns: int
    num_vectors: int


def tiles_of(image: Any, spec: VisionSpec) -> F32:
    """Return the tiles of an RGB image of Pillow, float32 [n, 3, height, width], in the order of `Division`."""
    processing, how = spec.processing, spec.normalization
    if isinstance(processing, AreaProcessing):
        return _normalized(_resized(image, _within_area(image.size, processing), how), how)[None]
    return _square_tiles(image, processing, how)


def division_of(size: Size, spec: VisionSpec) -> Division:
    """Return the tiles of an image of a size, without the image."""
    processing = spec.processing
    if isinstance(processing, AreaProcessing):
        return Division(0, 0, spec.num_vectors(*_within_area(size, processing)))
    divided = _divided([size, *_scaled(size, processing)][-1], processing)
    return Division(*divided, spec.num_vectors(processing.tile_size, processing.tile_size))


def num_vectors(size: Size, spec: VisionSpec) -> int:
    """Return the number of vectors of an image of a size."""
    rows, columns, of_tile = division_of(size, spec)
    return (rows * columns + 1) * of_tile


def text_of(size: Size, spec: VisionSpec) -> str:
    """Return the text of an image of a size in a prompt, see `ImagePrompt`."""
    return spec.prompt.text(*division_of(size, spec))


def patches_of(pixels: F32, patch_size: int) -> F32:
    """Return the patches of tiles [n, 3, H, W] as rows [n, R C, 3 · patch_size²], row by row.

    R, C: the whole patches in H and W. Pixels beyond them are in no patch.
    """
    n, channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    whole = pixels[:, :, : rows * patch_size, : columns * patch_size]
    cut = whole.reshape(n, channels, rows, patch_size, columns, patch_size)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3, 5)).reshape(n, -1, channels * patch_size**2)


def _square_tiles(image: Any, processing: TileProcessing, how: Normalization) -> F32:
    for scaled in _scaled(image.size, processing):
        image = _resized(image, scaled, how)
    size, (rows, columns) = processing.tile_size, _divided(image.size, processing)
    width, height = image.size
    across, down = -(-width // max(columns, 1)), -(-height // max(rows, 1))
    corners = [(column * across, row * down) for row in range(rows) for column in range(columns)]
    cut = [image.crop((x, y, min(x + across, width), min(y + down, height))) for x, y in corners]
    parts = [*cut, image] if processing.crops is None else [image, *cut]
    resized = (_resized(part, (size, size), how) for part in parts)
    return np.stack([_normalized(tile, how) for tile in resized])


def _scaled(size: Size, processing: TileProcessing) -> list[Size]:
    """Return the sizes to which an image is resized, one after the other, before it is divided."""
    found = [size]
    if processing.longest is not None:
        found.append(_longest_edge(found[-1], processing.longest))
    if processing.splits:
        found.append(_whole_tiles(found[-1], processing.tile_size))
    return found[1:]


def _divided(size: Size, processing: TileProcessing) -> tuple[int, int]:
    """Return the rows and columns of tiles of a resized image, or of its crops; 0 if it is one tile alone."""
    width, height = size
    if processing.crops is not None:
        count = _num_crops(size, processing.crops)
        return (min(1, count), count) if width >= height else (count, min(1, count))
    if not processing.splits or max(size) <= processing.tile_size:
        return 0, 0
    return height // processing.tile_size, width // processing.tile_size


def _num_crops(size: Size, how: CropProcessing) -> int:
    """Return the number of crops of an image, see `CropProcessing`."""
    shorter, longer = sorted(size)
    if longer / shorter < how.least_ratio:
        return 0
    count = min(how.most_crops, max(2, min(longer // how.least_side, math.floor(longer / shorter + 0.5))))
    return count if min(-(-longer // count), shorter) >= how.least_side else 0


def _longest_edge(size: Size, longest: int) -> Size:
    """Return the sizes in proportion whose longer one is ``longest``; the shorter one is even, and not 0."""
    width, height = size
    ratio = width / height
    other = int(longest / ratio if width >= height else longest * ratio)
    other = max(1, other + other % 2)
    return (longest, other) if width >= height else (other, longest)


def _whole_tiles(size: Size, tile: int) -> Size:
    """Return the sizes of whole tiles, at least one: the longer side first, then the shorter one in proportion."""

    def up(length: int) -> int:
        return max(1, -(-length // tile)) * tile

    width, height = size
    ratio = width / height
    if width >= height:
        width = up(width)
        return width, up(int(width / ratio))
    height = up(height)
    return up(int(height * ratio)), height


def _within_area(size: Size, processing: AreaProcessing) -> Size:
    """Return the sizes of a tile, see `AreaProcessing`."""
    unit, (width, height) = processing.multiple, size
    found = round(width / unit) * unit, round(height / unit) * unit
    area = found[0] * found[1]
    if area > processing.most_pixels:
        shrink = math.sqrt(width * height / processing.most_pixels)
        return max(unit, math.floor(width / shrink / unit) * unit), max(unit, math.floor(height / shrink / unit) * unit)
    if area < processing.least_pixels:
        grow = math.sqrt(processing.least_pixels / (width * height))
        return math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
    return found


def _resized(image: Any, size: Size, how: Normalization) -> Any:
    return image.resize(size, resample=how.resample)


def _normalized(image: Any, how: Normalization) -> F32:
    """Return (pixel · scale − mean) / std, float32 [3, height, width]."""
    scaled = (np.asarray(image).transpose(2, 0, 1).astype(np.float64) * how.scale).astype(np.float32)
    mean, std = (np.array(of, np.float32)[:, None, None] for of in (how.mean, how.std))
    found: F32 = (scaled - mean) / std
    return found
