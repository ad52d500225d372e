"""Turn an image into the tiles that an encoder reads, with Pillow and NumPy: equal to the processors of transformers
that use Pillow, number for number.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import F32
from foreword.models.vision_spec import AreaProcessing, CropProcessing, Normalization, TileProcessing, VisionSpec

Size = tuple[int, int]
"""Width and height."""


class Division(NamedTuple):
    """The division of an image into tiles: rows · columns of them, of one size, row by row, and one of all of it, which
    comes before its crops and after its tiles; without rows, one alone. of_tile, of_whole: the vectors of each tile,
    and of the one of all of it; 0: there is none.
    """

    rows: int
    columns: int
    of_tile: int
    of_whole: int


def tiles_of(image: Any, spec: VisionSpec) -> list[F32]:
    """Return the tiles of an RGB image of Pillow, each float32 [3, height, width], in the order of `Division`."""
    processing, how = spec.processing, spec.normalization
    parts = (
        _area_tiles(image, processing, how)
        if isinstance(processing, AreaProcessing)
        else _square_tiles(image, processing, how)
    )
    return [_normalized(tile, how) for tile in parts]


def division_of(size: Size, spec: VisionSpec) -> Division:
    """Return the tiles of an image of a size, without the image."""
    processing = spec.processing
    if isinstance(processing, AreaProcessing):
        of_whole = spec.num_vectors(*_within_area(size, processing))
        rows, columns = _grid_of(size, processing)
        if processing.grid is None or not rows:
            return Division(0, 0, 0, of_whole)
        tile = processing.grid.tile_size
        return Division(rows, columns, spec.num_vectors(tile, tile), of_whole if processing.grid.has_whole else 0)
    divided = _divided([size, *_scaled(size, processing)][-1], processing)
    of_tile = spec.num_vectors(processing.tile_size, processing.tile_size)
    return Division(*divided, of_tile, of_tile)


def num_vectors(size: Size, spec: VisionSpec) -> int:
    """Return the number of vectors of an image of a size."""
    rows, columns, of_tile, of_whole = division_of(size, spec)
    return rows * columns * of_tile + of_whole


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


def _area_tiles(image: Any, processing: AreaProcessing, how: Normalization) -> list[Any]:
    grid, (rows, columns) = processing.grid, _grid_of(image.size, processing)
    tiles: list[Any] = []
    if grid is not None and rows:
        side = grid.tile_size
        large = _resized(image, (columns * side, rows * side), how)
        corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
        tiles = [large.crop((x, y, x + side, y + side)) for x, y in corners]
        if not grid.has_whole:
            return tiles
    return [*tiles, _resized(image, _within_area(image.size, processing), how)]


def _grid_of(size: Size, processing: AreaProcessing) -> tuple[int, int]:
    """Return the rows and columns of tiles of an image, see `GridProcessing`; 0 if it has no tiles but the whole."""
    grid = processing.grid
    if grid is None:
        return 0, 0
    width, height = size
    across, down = (max(grid.least_side, one) for one in _multiples(size, processing.multiple))
    if across * down <= grid.most_pixels:
        return 0, 0
    rows, columns, nearest = 1, 1, math.inf
    for c, r in _grids(grid.least_tiles, grid.most_tiles):
        distance = abs(width / height - c / r)
        if distance < nearest or (distance == nearest and width * height > 0.5 * (grid.tile_size**2 * c * r)):
            rows, columns, nearest = r, c, distance
    return rows, columns


@lru_cache(maxsize=64)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return the columns and rows of all grids of least to most tiles, fewer tiles first; those with the same number
    of tiles in the order of a set to which they were added by their longer side, since the last of those that are as
    near is taken.
    """
    found = {
        (columns, rows)
        for longer in range(least, most + 1)
        for columns in range(1, longer + 1)
        for rows in range(1, longer + 1)
        if least <= columns * rows <= most
    }
    return sorted(found, key=lambda one: one[0] * one[1])


def _square_tiles(image: Any, processing: TileProcessing, how: Normalization) -> list[Any]:
    for scaled in _scaled(image.size, processing):
        image = _resized(image, scaled, how)
    size, (rows, columns) = processing.tile_size, _divided(image.size, processing)
    width, height = image.size
    across, down = -(-width // max(columns, 1)), -(-height // max(rows, 1))
    corners = [(column * across, row * down) for row in range(rows) for column in range(columns)]
    cut = [image.crop((x, y, min(x + across, width), min(y + down, height))) for x, y in corners]
    parts = [*cut, image] if processing.crops is None else [image, *cut]
    return [_resized(part, (size, size), how) for part in parts]


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
    if processing.fills:
        grow, longest = math.sqrt(processing.most_pixels / (height * width)), processing.most_pixels // unit
        across, down = (math.floor(grow * one / unit) * unit for one in size)
        if not down:
            return min(width // height * unit, longest), unit
        return (across, down) if across else (unit, min(height // width * unit, longest))
    across, down = (max(processing.least_side, one) for one in _multiples(size, unit))
    area = across * down
    if area > processing.most_pixels:
        shrink = math.sqrt(width * height / processing.most_pixels)
        return max(unit, math.floor(width / shrink / unit) * unit), max(unit, math.floor(height / shrink / unit) * unit)
    if area < processing.least_pixels:
        grow = math.sqrt(processing.least_pixels / (width * height))
        return math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
    return across, down


def _multiples(size: Size, unit: int) -> Size:
    """Return the nearest multiples of both sides, which may be 0."""
    width, height = size
    return round(width / unit) * unit, round(height / unit) * unit


def _resized(image: Any, size: Size, how: Normalization) -> Any:
    return image.resize(size, resample=how.resample)


def _normalized(image: Any, how: Normalization) -> F32:
    """Return (pixel · scale − mean) / std, float32 [3, height, width]."""
    pixels = np.asarray(image).transpose(2, 0, 1)
    mean, std = (np.array(of, np.float32)[:, None, None] for of in (how.mean, how.std))
    if how.is_joint:
        unit = np.float32(1 / how.scale)
        joint: F32 = (pixels.astype(np.float32) - mean * unit) / (std * unit)
        return joint
    scaled = (pixels.astype(np.float64) * how.scale).astype(np.float32)
    found: F32 = (scaled - mean) / std
    return found
