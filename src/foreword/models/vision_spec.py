"""An encoder of images as data: a vision transformer over patches, and a projector to the vectors of a decoder.

An image becomes tiles of rows × columns patches: square ones (`TileProcessing`), or one of its own proportions, which
square ones may precede (`AreaProcessing`). Of each tile, with its patches as rows [rows · columns, 3 · patch_size²],
channel by channel:

    x = patches Wpatch + bpatch + positions[ids]       see `VisionSpec.placing`; without num_positions: patches Wpatch
    x = tower(x)                                       the layers of `EncoderSpec`: every patch sees the whole tile,
                                                       or its window; rotated by its row (axis 0) and column (axis 1)
    v = shuffled(x, factor) Wproj                      projector "shuffle"
    v = act(shuffled(x, factor) Wproj + b) Wout + b    projector "mlp"; with a layer norm first, and without b, if its
                                                       `MlpProjector` says so
    v = norm(pooled(x, factor), proj_norm) Wproj       projector "pool"
    v = unit(pooled(x, factor) · √hidden) Wproj        projector "unit_pool"; with standardizes, (y − std_bias) ·
                                                       std_scale in place of y = pooled(x, factor) · √hidden

With feature_layers, further vectors go from the states after these layers to the first layers of the decoder, each by a
projector of its own: gelu(norm(shuffled(x, factor), norm) Wproj + b) Wout + b.

``shuffled`` joins the patches of each factor × factor square to one vector, row by row; ``pooled`` is their mean; norm
is that of `foreword.models.spec`, and unit is it without a weight. The vectors v [rows · columns / factor²,
vector_size] take the place of the embeddings of as many tokens of a prompt (`ImagePrompt`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from foreword.models.encoder_spec import EncoderActivation, EncoderSpec, encoder_weight_names

Projector = Literal["shuffle", "mlp", "pool", "unit_pool"]
Placing = Literal["rows", "nearest", "linear", "resized", "axes"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """The pixels of a tile are (pixel · scale − mean) / std of each channel. resample: the filter of Pillow, by its
    number, by which an image is resized. is_joint: in float32, as (pixel − mean / scale) / (std / scale).
    """

    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    is_joint: bool = False


@dataclass(frozen=True, slots=True)
class CropProcessing:
    """The crops beside a long image (pan and scan): its longer side is divided into equal parts, as many as the
    shorter one fits into it (half a time counts), at least 2, of at least least_side pixels, at most
    most_crops. There are none if the sides have a ratio below least_ratio, or if a crop has a side below least_side.
    """

    least_side: int
    most_crops: int
    least_ratio: float


@dataclass(frozen=True, slots=True)
class TileProcessing:
    """The division of an image into tiles of tile_size × tile_size pixels.

    longest: None: the whole image is resized to one tile, and its crops to one each, which follow. Else its longer side
    is resized to this length, and the shorter one in proportion; with ``splits``, both sides are then enlarged to
    multiples of a tile and cut into tiles, which the whole image as a tile follows, unless there is only one.
    """

    tile_size: int
    longest: int | None
    splits: bool
    crops: CropProcessing | None = None


@dataclass(frozen=True, slots=True)
class GridProcessing:
    """The tiles of a large image, before it as one tile: one that has more than most_pixels, if both sides are rounded
    to the multiples of its `AreaProcessing` and at least least_side.

    It is resized to a grid of least_tiles to most_tiles squares of tile_size × tile_size pixels: that whose sides have
    the ratio nearest to that of its own; among equally near ones, the last one, by their number of tiles, that has
    less than twice the pixels of the image. has_whole: whether the whole image follows as one tile.
    """

    tile_size: int
    least_tiles: int
    most_tiles: int
    most_pixels: float
    least_side: int
    has_whole: bool


@dataclass(frozen=True, slots=True)
class AreaProcessing:
    """The change of an image into one tile: both sides are resized to the next multiples of ``multiple`` pixels, at
    least least_side; if these are more or fewer pixels than the bounds, in proportion to an area of the bound, rounded
    to multiples within it. grid: of large images; None: none has one.
    fills: in place of that, they are resized in proportion to an area of most_pixels, and down to multiples. A side
    that would be 0 is one multiple; the other one is then as many as their ratio, within the area.
    """

    multiple: int
    least_pixels: int
    most_pixels: int
    least_side: int = 0
    grid: GridProcessing | None = None
    fills: bool = False


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """The text of an image in a prompt. Each ``token`` in it has a vector in place of its embedding.

    placeholder: the text that chat templates write for an image, which is replaced. start: before all of it. begin,
    end: around the tokens of an image of one tile. tile, row_end: before the tokens of a tile, with its row and column,
    and after a row of tiles. whole: before a whole image that has tiles or crops, too. crops: before the crops, each of
    which is as an image of one tile, with a space between two.
    """

    placeholder: str
    token: str
    begin: str
    end: str
    tile: str = ""
    row_end: str = ""
    whole: str = ""
    crops: str = ""
    start: str = ""

    def text(self, rows: int, columns: int, of_tile: int, of_whole: int) -> str:
        """Return the text of an image of rows × columns tiles, or crops, and one of all of it, or without rows of one
        tile.

        of_tile, of_whole: the number of tokens of a tile, and of the whole image, 0 if the tiles are all.
        """
        tokens, whole = self.token * of_tile, self.token * of_whole
        if self.crops and rows:
            one = f"{self.begin}{tokens}{self.end}"
            return self.whole + one + self.crops + " ".join([one] * (rows * columns))
        tiles = "".join(
            "".join(self.tile.format(row=r + 1, column=c + 1) + tokens for c in range(columns)) + self.row_end
            for r in range(rows)
        )
        between = (self.row_end if rows else "") + (self.whole if rows and of_whole else "")
        return f"{self.start}{tiles}{between}{self.begin}{whole}{self.end}"


@dataclass(frozen=True, slots=True)
class MlpProjector:
    """The differences between projectors "mlp". size: the numbers between its products; None: as many as it gets.
    norm_eps: of a layer norm of what it gets; None: it has none.
    """

    size: int | None = None
    activation: EncoderActivation = "gelu"
    norm_eps: float | None = None
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder of images; the module docstring gives the arithmetic.

    tower: without an embedding. num_positions: rows of the table of positions, 0 for none. placing: the position of a
    patch is the row of its number ("rows"), or that of the table as a square at its place: at the same fraction of the
    side, as float32 rounds it ("nearest"), or between the four rows around it, corner on corner ("linear"), or of the
    square resized to the grid of the tile with a triangular filter, as wide as a place of the square or, if that is
    larger, of the grid ("resized"). "axes": the sum of the row of its column in a first table, and of its row in a
    second one; then there is no bpatch. is_centred: Wpatch multiplies 2 patches − 1.
    vector_size: the decoder's hidden_size. sees_all: the vectors of an image see each other in the decoder.
    window: patches along a side of the windows of windowed layers, from the first row and column on. num_frames: of
    Wpatch, each of which multiplies the same patch. is_placed: in the decoder, the rotary positions of a vector are
    those of its place in the image (M-RoPE). feature_layers: ascending. mlp: of the projector "mlp".
    """

    tower: EncoderSpec
    patch_size: int
    num_positions: int
    placing: Placing
    factor: int
    projector: Projector
    vector_size: int
    processing: TileProcessing | AreaProcessing
    normalization: Normalization
    prompt: ImagePrompt
    sees_all: bool = False
    window: int = 0
    num_frames: int = 1
    is_placed: bool = False
    is_centred: bool = False
    standardizes: bool = False
    feature_layers: tuple[int, ...] = ()
    mlp: MlpProjector = MlpProjector()

    def num_vectors(self, width: int, height: int) -> int:
        """Return the number of vectors of a tile of width × height pixels, of which whole patches count."""
        rows, columns = (pixels // self.patch_size // self.factor for pixels in (height, width))
        return rows * columns


def vision_weight_names(spec: VisionSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every canonical weight name with its shape, in execution order. Matrices are [out, in]; Wproj of "pool" is
    [in, out], as files have it.
    """
    d, joined = spec.tower.hidden_size, spec.tower.hidden_size * spec.factor**2
    frames = (spec.num_frames,) if spec.num_frames > 1 else ()
    yield "patch", (d, 3, *frames, spec.patch_size, spec.patch_size)
    if spec.num_positions and spec.placing == "axes":
        yield "positions", (2, spec.num_positions, d)
    elif spec.num_positions:
        yield "patch_bias", (d,)
        yield "positions", (spec.num_positions, d)
    yield from encoder_weight_names(spec.tower)
    if spec.projector == "pool":
        yield "proj_norm", (d,)
        yield "proj", (d, spec.vector_size)
    elif spec.projector == "unit_pool":
        if spec.standardizes:
            yield "std_bias", (d,)
            yield "std_scale", (d,)
        yield "proj", (spec.vector_size, d)
    elif spec.projector == "mlp":
        inner = joined if spec.mlp.size is None else spec.mlp.size
        if spec.mlp.norm_eps is not None:
            yield "proj_norm", (joined,)
            yield "proj_norm_bias", (joined,)
        for name, shape in (("proj", (inner, joined)), ("out", (spec.vector_size, inner))):
            yield name, shape
            if spec.mlp.has_bias:
                yield f"{name}_bias", shape[:1]
        for k in range(len(spec.feature_layers)):
            for name in ("norm", "norm_bias", "proj_bias"):
                yield f"features.{k}.{name}", (joined,)
            yield f"features.{k}.proj", (joined, joined)
            yield f"features.{k}.out", (spec.vector_size, joined)
            yield f"features.{k}.out_bias", (spec.vector_size,)
    else:
        yield "proj", (spec.vector_size, joined)
