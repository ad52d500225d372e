"""FP8: w[o, i] = weight[o, i] · scale, weights in e4m3, with a scale per matrix, row or rectangle of it.

``weight_scale`` and ``weight_scale_inv`` both multiply; scales of bytes are powers of two. ``mxfp8`` has one for each
32 columns, ``fbgemm_fp8`` one for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.codebooks import e4m3
from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.quantized.matrix import SAME_MODEL, Found, encoded, in_chunks, of_8_bits, one_of, part, scales_of
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry


def _e4m3() -> F32:
    """Return the float32 of each byte, whose highest bit is the sign; 0x7F and 0xFF are NaN."""
    values = e4m3()
    values[127] = np.nan
    return np.concatenate([values, -values])


E4M3 = _e4m3()


@dataclass(frozen=True, slots=True, eq=False)
class _Fp8Matrix:
    """block: rows and columns of a rectangle with one scale."""

    weight: Entry
    scale: Entry
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def source(self) -> str:
        names = {self.shape: "matrix", (1, self.shape[1]): "row"}
        return f"FP8 with a scale per {names.get(self.block) or f'{self.block[0]} × {self.block[1]} weights'}"

    @property
    def quant(self) -> Quant:
        return of_8_bits(self.shape)

    def convert(self, start: int, stop: int) -> U8:
        columns, (block_rows, block_columns) = self.shape[1], self.block
        grid = scales_of(self.scale).reshape(-1, ceil(columns / block_columns))

        def rows(first: int, last: int) -> U8:
            values = E4M3.take(self.weight.rows[first:last].read())
            scales = grid[np.arange(first, last) // block_rows]
            values *= scales.repeat(min(block_columns, columns), axis=1)[:, :columns]
            if np.isnan(values).any():
                raise self.weight.error("holds a NaN")
            return encoded(values, self.quant)

        return in_chunks(self, start, stop, rows)


def fp8_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the FP8 matrices of a checkpoint by fp8. Raise ModelError if one has no scales that fit it."""
    block = sizes(settings, "quantization_config.weight_block_size") or ((1, 32) if method == "mxfp8" else None)
    one_of(settings, "expert_dtype", "fp8", ("fp8",))
    for name, weight in entries.items():
        if weight.dtype == "F8_E4M3":
            yield fp8_matrix(entries, name, weight, block)


def sizes(settings: Config, key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if the key is absent. Raise ModelError unless it has two sizes."""
    given = settings.sequence(key)
    if given and (len(given) != 2 or not all(type(n) is int and n > 0 for n in given)):
        raise settings.error(f"{key} is {given!r:.80}, not two sizes", FETCH_AGAIN)
    return (given[0], given[1]) if given else None


def fp8_matrix(entries: Mapping[str, Entry], name: str, weight: Entry, block: tuple[int, int] | None) -> Found:
    """Return the matrix of a tensor in FP8. block: see `sizes`. Raise ModelError as `fp8_matrices`."""
    scale_name = f"{name}_scale_inv" if f"{name}_scale_inv" in entries else f"{name}_scale"
    scale = part(entries, weight, scale_name, "scale")
    scales_of(scale)
    return Found(name, _matrix(weight, scale, block), (weight, scale))


def _matrix(weight: Entry, scale: Entry, block: tuple[int, int] | None) -> _Fp8Matrix:
    """Raise ModelError if the scales have a shape for which there is no rule."""
    if len(weight.shape) != 2:
        raise weight.error(f"shape {weight.shape} in FP8 is not of a matrix", SAME_MODEL)
    rows, columns = shape = weight.shape[0], weight.shape[1]
    if scale.shape in ((1,), (1, 1)):
        return _Fp8Matrix(weight, scale, shape, shape)
    if scale.shape in ((rows,), (rows, 1)):
        return _Fp8Matrix(weight, scale, shape, (1, columns))
    if block and scale.shape == (ceil(rows / block[0]), ceil(columns / block[1])):
        return _Fp8Matrix(weight, scale, shape, block)
    blocks = f"weight_block_size {list(block)}" if block else "no weight_block_size"
    raise scale.error(f"shape {scale.shape} does not fit a matrix {shape} with {blocks}", SAME_MODEL)
