"""Checkpoints of MLX: NAME.weight (U32) has the integers of a row as one string of bits, lowest bits first.

| mode     | bits, columns of a group       | NAME.scales      | NAME.biases | a weight                |
|----------|--------------------------------|------------------|-------------|-------------------------|
| affine   | 2, 3, 4, 5, 6, 8; 32, 64, 128  | float            | float       | s · q + b, q unsigned   |
| mxfp4    | 4; 32                          | U8               | –           | 2^(s − 127) · e2m1      |
| mxfp8    | 8; 32                          | U8               | –           | 2^(s − 127) · e4m3      |
| nvfp4    | 4; 16                          | U8, as e4m3      | –           | s · e2m1 · g / 2688     |

g is the number of its expert in NAME.global_scale; without this tensor, s · e2m1 is the weight.

``quantization`` in config.json has these settings, and by the path of a layer those of that layer. Where transformers
writes affine ones, as ``quant_method`` metal, the biases are NAME.qbiases. `foreword.models.mlx_names` has what else
MLX changes, in checkpoints that are not quantised, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.quantized.affine import AffineMatrix, Factors
from foreword.models.quantized.fp8 import E4M3
from foreword.models.quantized.matrix import (
    SAME_MODEL,
    WITHOUT_IT,
    ConvertedRows,
    Found,
    Matrix,
    check_unread,
    checked,
    encoded,
    in_chunks,
    one_of,
    part,
    scales_of,
)
from foreword.models.quantized.mxfp4 import mxfp4_tensor
from foreword.models.quantized.nvfp4 import Nvfp4Matrix, factors_of
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry
from foreword.models.weights import Tensor

_MODES = {"affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)), "mxfp4": ((4,), (32,)), "mxfp8": ((8,), (32,)),
          "nvfp4": ((4,), (16,))}  # fmt: skip
"""The numbers of bits, and of columns of a group, of each mode."""
_USUAL = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Those of a layer whose settings have none."""
_LARGEST_NVFP4 = 448 * 6
"""The largest e4m3 times the largest e2m1, by which a global scale is divided."""
_ROUTERS = (
    *(".gate.weight", ".router.weight", ".shared_expert_gate.weight", ".gate.gate_proj.weight", ".gate.proj.weight"),
    *(".router.gate.weight", ".router.proj.weight", ".router.layer.weight", ".gate.wg.weight"),
)
"""Small matrices, which choose experts, so that rounding them again could change the choice."""


@dataclass(frozen=True, eq=False)
class _MlxMatrix(AffineMatrix):
    weight: Entry
    scale: Entry
    bias: Entry

    @property
    def source(self) -> str:
        return f"MLX ({self.bits} bit, groups of {self.group_size})"

    @cached_property
    def quant(self) -> Quant:
        """Return F32 for a router."""
        return Quant.F32 if self.weight.name.endswith(_ROUTERS) else super().quant

    def factors(self) -> Factors:
        scale, bias = (
            scales_of(entry).reshape(-1, self.shape[1] // self.group_size) for entry in (self.scale, self.bias)
        )
        return lambda start, stop: (scale[start:stop], bias[start:stop])

    def integers(self, start: int, stop: int) -> U8:
        return _integers(self.weight.rows[start:stop].read(), self.bits)


@dataclass(frozen=True, slots=True, eq=False)
class _Mxfp8Matrix:
    weight: Entry
    scale: Entry
    shape: tuple[int, int]

    source = "MXFP8"
    quant = Quant.Q8_0

    def convert(self, start: int, stop: int) -> U8:
        def rows(first: int, last: int) -> U8:
            values = E4M3.take(self.weight.rows[first:last].read()).reshape(-1, 32)
            exponents = self.scale.rows[first:last].read().astype(np.int32).reshape(-1, 1) - 127
            values *= checked(self.scale, np.ldexp(1.0, exponents))
            if np.isnan(values).any():
                raise self.weight.error("holds a NaN")
            return encoded(values, self.quant)

        return in_chunks(self, start, stop, rows)


def _integers(data: U8, bits: int) -> U8:
    """Return the integers of rows of bits, lowest first: uint8 [rows, bytes] → [rows, bytes · 8 / bits]."""
    if bits == 8:
        return data
    fields = np.unpackbits(data, axis=1, bitorder="little").reshape(len(data), -1, bits)
    return np.packbits(fields, axis=2, bitorder="little")[..., 0]


def mlx_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by MLX. Raise ModelError if the tensors of one do not fit its settings or each
    other.
    """
    whole = _of_layer(settings, is_whole=True)
    for name, weight in entries.items():
        path = name.removesuffix(".weight")
        if name == path or f"{path}.scales" not in entries:
            continue
        mode, bits, size, has_factors = whole
        own = settings.value(f"quantization_config.{path}")
        if isinstance(own, dict):
            values = {f"quantization_config.{key}": value for key, value in own.items()}
            of_layer = Config(settings.path, values, part=f"{path:.80}: ")
            mode, bits, size, has_factors = _of_layer(of_layer, is_whole=False)
            check_unread(of_layer, (), WITHOUT_IT)
        elif own not in (None, True):
            raise settings.error(f"{path:.80} has scales, and quantization says {own!r:.80}", USE_ITS_CONFIG)
        part(entries, weight, name, "U32")
        scale = part(entries, weight, f"{path}.scales", "float" if mode == "affine" else "U8")
        columns = scale.shape[-1] * size
        if len(weight.shape) < 2 or columns * bits != 32 * weight.shape[-1] or scale.shape[:-1] != weight.shape[:-1]:
            what = f"shape {weight.shape} with scales {scale.shape} is not of {bits} bit in groups of {size}"
            raise weight.error(what, SAME_MODEL)
        if mode == "mxfp4":
            yield Found(name, mxfp4_tensor(weight, scale), (weight, scale))
            continue
        shape, flat, parts = (*weight.shape[:-1], columns), (len(weight.rows), columns), [weight, scale]
        matrix: Matrix
        if mode == "affine":
            bias = part(entries, weight, f"{path}.{'qbiases' if method == 'metal' else 'biases'}", "float")
            if bias.shape != scale.shape:
                raise bias.error(f"shape {bias.shape} is not that of the scales, {scale.shape}", SAME_MODEL)
            parts.append(bias)
            matrix = _MlxMatrix(bits, size, flat, weight, scale, bias)
        else:
            factors: F32 = np.ones(1, np.float32)
            if has_factors or (mode == "nvfp4" and f"{path}.global_scale" in entries):
                parts.append(of_experts := part(entries, weight, f"{path}.global_scale", "float"))
                count = 1 if len(shape) == 2 else shape[0]
                factors = (factors_of(of_experts, count) / np.float32(_LARGEST_NVFP4)).repeat(flat[0] // count)
            matrix = _Mxfp8Matrix(weight, scale, flat) if mode == "mxfp8" else Nvfp4Matrix(weight, scale, factors, flat)
        yield Found(name, Tensor(ConvertedRows(matrix, 0, flat[0]), matrix.quant, shape), tuple(parts))


def _of_layer(own: Config, *, is_whole: bool) -> tuple[str, int, int, bool]:
    """Return mode, bits, size of groups, and whether experts have a global scale each. Raise ModelError for a key or
    value that is not supported. is_whole: whether they are the settings of all layers, which are never left out.
    """
    mode = one_of(own, "mode", "affine", tuple(_MODES))
    found = []
    for key, supported, usual in zip(("bits", "group_size"), _MODES[mode], _USUAL[mode], strict=True):
        value = own.size(f"quantization_config.{key}", None if is_whole else usual)
        if value not in supported:
            what = f"quantization_config.{key} is {value}, which is not supported in mode {mode}"
            raise own.error(what, f"Use a checkpoint of {', '.join(map(str, supported))}")
        found.append(value)
    has_factors = mode == "nvfp4" and own.get("quantization_config.global_scale", bool, False)
    return mode, found[0], found[1], has_factors
