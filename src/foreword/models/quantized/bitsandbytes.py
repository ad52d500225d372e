"""bitsandbytes of 4 and 8 bit.

In 4 bit, w = map[n] · absmax of the block, with a map of 16 numbers, nf4 or fp4. The 4 bits n of all weights follow
each other row after row, two in a byte, the first in the high ones, and blocks go on from row to row. Where absmax is
quantised too, it is nested_map[byte] · nested_absmax of its own block + an offset.

In 8 bit, w[o, i] = q[o, i] · SCB[o] / 127. Inputs of products are not quantised here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foreword.arrays import F32, U8
from foreword.errors import ModelError
from foreword.jsonfile import parse_object
from foreword.models.config import Config
from foreword.models.quantized.integers import IntegerRows
from foreword.models.quantized.matrix import (
    LARGEST_SCALE,
    SAME_MODEL,
    Found,
    checked,
    encoded,
    in_chunks,
    of_8_bits,
    one_of,
    part,
    scales_of,
)
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry


@dataclass(frozen=True, slots=True, eq=False)
class _Nested:
    """The parts of a quantised absmax."""

    absmax: Entry
    map: Entry
    block_size: int
    offset: float


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix4:
    kind: str
    weight: Entry
    map: Entry
    absmax: Entry
    nested: _Nested | None
    block_size: int
    shape: tuple[int, int]

    @property
    def source(self) -> str:
        return f"bitsandbytes ({self.kind}, blocks of {self.block_size}{', nested' if self.nested else ''})"

    @property
    def quant(self) -> Quant:
        return of_8_bits(self.shape)

    def scales(self) -> F32:
        """Return the absmax of each block."""
        if self.nested is None:
            return scales_of(self.absmax).ravel()
        found = _floats(self.nested.map).take(self.absmax.rows.read().ravel())
        found *= _floats(self.nested.absmax).repeat(self.nested.block_size)[: len(found)]
        return checked(self.absmax, found + np.float32(self.nested.offset))

    def convert(self, start: int, stop: int) -> U8:
        columns, scales, values = self.shape[1], self.scales(), _floats(self.map)
        pairs = replace(self.weight.rows, num_rows=self.weight.rows.nbytes, row_bytes=1)

        def rows(first: int, last: int) -> U8:
            begin, end = first * columns, last * columns
            some = pairs[begin // 2 : -(-end // 2)].read()
            numbers = np.concatenate([some >> 4, some & 15], axis=1).ravel()[begin % 2 :][: end - begin]
            found = values.take(numbers) * scales.take(np.arange(begin, end) // self.block_size)
            return encoded(found.reshape(-1, columns), self.quant)

        return in_chunks(self, start, stop, rows)


def bitsandbytes_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by bitsandbytes. Raise ModelError if the tensors of one do not fit."""
    in_4, in_8 = (settings.get(f"quantization_config.load_in_{bits}bit", bool, False) for bits in (4, 8))
    if in_4 == in_8:
        what = f"quantization_config.load_in_4bit and load_in_8bit are both {in_4}".lower()
        raise settings.error(what, "Use the configuration that came with the weights")
    kind = one_of(settings, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    is_nested = settings.get("quantization_config.bnb_4bit_use_double_quant", bool, False)
    for name, weight in entries.items():
        stem = name.removesuffix("weight")
        if stem == name:
            continue
        if in_8 and weight.dtype == "I8":
            yield _in_8(entries, stem, weight)
        elif in_4 and f"{name}.absmax" in entries:
            yield _in_4(entries, name, weight, kind, is_nested=is_nested)


def _in_8(entries: Mapping[str, Entry], stem: str, weight: Entry) -> Found:
    scale = part(entries, weight, f"{stem}SCB", "F32")
    if len(weight.shape) != 2 or scale.shape not in ((weight.shape[0],), (weight.shape[0], 1)):
        raise scale.error(f"shape {scale.shape} does not fit a matrix {weight.shape}", SAME_MODEL)
    shape = weight.shape[0], weight.shape[1]
    matrix = IntegerRows("bitsandbytes", 8, 0, shape, weight, scale, None, None, divisor=127)
    matrix.check()
    parts = matrix.parts
    if (order := entries.get(f"{stem}weight_format")) is not None:
        if order.rows.read().any():
            raise order.error("is not 0, the order of rows", "Save the model again with a newer bitsandbytes")
        parts = (*parts, order)
    return Found(f"{stem}weight", matrix, parts)


def _in_4(entries: Mapping[str, Entry], name: str, weight: Entry, kind: str, *, is_nested: bool) -> Found:
    def tensor(suffix: str, dtype: str, count: int) -> Entry:
        """Return a tensor of so many numbers."""
        found = part(entries, weight, f"{name}.{suffix}", dtype)
        if (size := found.rows.nbytes // (1 if dtype == "U8" else 4)) != count:
            raise found.error(f"has {size} numbers, expected {count}", SAME_MODEL)
        return found

    state = part(entries, weight, f"{name}.quant_state.bitsandbytes__{kind}", "U8")
    path, where = state.rows.file.path, f"tensor {state.name!r:.80}: "
    own = Config(path, parse_object(state.rows.read().tobytes(), f"{path}: {where}", ModelError), part=where)
    shape, size = own.sequence("shape"), own.size("blocksize", most=1 << 16)
    if len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise state.error(f"shape is {shape!r:.80}, not of a matrix")
    if own.get("quant_type", str, kind) != kind:
        raise state.error(f"quant_type is {own.value('quant_type')!r:.80}, not {kind}", SAME_MODEL)
    count = shape[0] * shape[1]
    if weight.rows.nbytes != -(-count // 2):
        raise weight.error(f"has {weight.rows.nbytes} bytes, which do not fit a matrix {shape} in 4 bit", SAME_MODEL)
    blocks = -(-count // size)
    absmax, values = tensor("absmax", "U8" if is_nested else "F32", blocks), tensor("quant_map", "F32", 16)
    if not (np.abs(_floats(values)) <= 1).all():
        raise values.error("holds other numbers than those from -1 to 1")
    nested = None
    if is_nested:
        inner, offset = own.size("nested_blocksize", most=1 << 16), own.get("nested_offset", float)
        if abs(offset) > LARGEST_SCALE:
            raise state.error(f"nested_offset = {offset} is not a number of at most {LARGEST_SCALE}")
        maxima, numbers = tensor("nested_absmax", "F32", -(-blocks // inner)), tensor("nested_quant_map", "F32", 256)
        nested = _Nested(maxima, numbers, inner, offset)
    matrix = _Matrix4(kind, weight, values, absmax, nested, size, (shape[0], shape[1]))
    parts = (weight, state, absmax, values) + ((nested.absmax, nested.map) if nested else ())
    return Found(name, matrix, parts)


def _floats(entry: Entry) -> F32:
    return entry.tensor().dequantize().ravel()
