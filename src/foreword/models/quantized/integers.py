"""Integers: w[o, i] = s[o, g] · (q[o, i] − z[o, g]) for column i in group g, with unsigned q and z.

AWQ and GPTQ pack q and z into words of 32 bits, lowest bits first: those of AWQ along ``out``, eight of them in the
order 0 2 4 6 1 3 5 7; those of GPTQ along ``in`` (q) and ``out`` (z). g is i // group_size, or g_idx[i] where GPTQ
sorted the columns before it made groups. GPTQ stores z − 1, its second version z. AutoRound writes either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I64, U8
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.files import FETCH_AGAIN, FileRows
from foreword.models.quantized.matrix import (
    MOST_COLUMNS,
    SAME_MODEL,
    Found,
    encoded,
    in_chunks,
    one_of,
    part,
    scales_of,
)
from foreword.models.quants import Quant, pack_q4, pack_q8
from foreword.models.safetensors import Entry

Words = npt.NDArray[np.uint32]
_GPTQ = ("gptq", "gptq_v2")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of columns 0 to 7 in a word."""
_SIGN = np.uint8(128)
"""Turns signed integers of 8 bits into unsigned ones, and is their zero point then."""


@dataclass(frozen=True, eq=False)
class IntegerMatrix(ABC):
    """group_size: 0 for one group of all columns. zero: None if all z are half of the range. g_idx: None if groups are
    of adjacent columns.
    """

    method: str
    bits: int
    group_size: int
    shape: tuple[int, int]
    weight: Entry
    scale: Entry
    zero: Entry | None
    g_idx: Entry | None

    @property
    def parts(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in (self.weight, self.scale, self.zero, self.g_idx) if entry is not None)

    @property
    def source(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group"
        of_any = "" if self.block_groups() is not None or self.shape[1] % 32 else " of any columns"
        return f"{self.method} ({self.bits} bit, {groups}{of_any})"

    @property
    def num_groups(self) -> int:
        return ceil(self.shape[1] / (self.group_size or self.shape[1]))

    @cached_property
    def quant(self) -> Quant:
        """Return the format that represents the matrix best."""
        if self.shape[1] % 32:
            return Quant.F32
        if self.bits == 8 or self.block_groups() is None:
            return Quant.Q8_0
        return Quant.Q4_0 if (self.zeros() == 8).all() else Quant.Q4_1

    def groups(self) -> I64:
        """Return the group of each column."""
        if self.g_idx is None:
            return np.arange(self.shape[1]) // (self.group_size or self.shape[1])
        return self.g_idx.rows.read().view("<i4").ravel().astype(np.int64)

    def block_groups(self) -> I64 | None:
        """Return the group of each block of 32 columns; None unless each is in one group."""
        groups = self.groups()
        if len(groups) % 32:
            return None
        blocks = groups.reshape(-1, 32)
        return blocks[:, 0] if (blocks == blocks[:, :1]).all() else None

    @abstractmethod
    def scales(self) -> F32:
        """Return s, float32 [out, groups]."""

    @abstractmethod
    def zeros(self) -> U8:
        """Return z, uint8 [out, groups]."""

    @abstractmethod
    def integers(self) -> Callable[[int, int], U8]:
        """Return what gives q of rows [start, stop), uint8 [rows, in]."""

    def check(self, **shapes: tuple[int, ...]) -> None:
        """Raise ModelError unless entries have these shapes, scales are numbers, and groups exist."""
        for name, shape in {**shapes, "g_idx": (self.shape[1],)}.items():
            entry: Entry | None = getattr(self, name)
            if entry is not None and entry.shape != shape:
                what = f"does not fit a matrix {self.shape} of {self.num_groups} groups: expected {shape}"
                raise entry.error(f"shape {entry.shape} {what}", SAME_MODEL)
        scales_of(self.scale)
        groups = self.groups()
        if self.g_idx is not None and (groups.min() < 0 or groups.max() >= self.num_groups):
            raise self.g_idx.error(f"a group is not from 0 to {self.num_groups - 1}")

    def convert(self, start: int, stop: int) -> U8:
        groups, blocks, integers = self.groups(), self.block_groups(), self.integers()
        scales, zeros = np.ascontiguousarray(self.scales()), np.ascontiguousarray(self.zeros())

        def rows(first: int, last: int) -> U8:
            q, scale, zero = integers(first, last), scales[first:last], zeros[first:last]
            if blocks is not None and self.quant is not Quant.Q8_0:
                scale = scale.take(blocks, axis=1).ravel()
                offset = None if self.quant is Quant.Q4_0 else -scale * zero.take(blocks, axis=1).ravel()
                return pack_q4(q.reshape(-1, 32), scale, offset)
            signed = q.astype(np.int16) - zero.take(groups, axis=1)
            small = signed.astype(np.int8)
            if blocks is not None and (small == signed).all():
                return pack_q8(small.reshape(-1, 32), scale.take(blocks, axis=1).ravel())
            return encoded(signed * scale.take(groups, axis=1), self.quant)

        return in_chunks(self, start, stop, rows)


@dataclass(frozen=True, eq=False)
class IntegerRows(IntegerMatrix):
    """Rows of int8, or of words whose fields are packed along ``in``, z along ``out``. The scales are one for all, or
    one for each row or group of it. divisor: of the scales.
    """

    divisor: int = 1

    def scales(self) -> F32:
        scales = scales_of(self.scale) / np.float32(self.divisor)
        return np.broadcast_to(scales.reshape(-1, self.num_groups), (self.shape[0], self.num_groups))

    def zeros(self) -> U8:
        shape = self.shape[0], self.num_groups
        if self.zero is None:
            return np.full(shape, 1 << self.bits - 1, np.uint8)
        if self.zero.dtype == "I8":
            return np.broadcast_to(self.zero.rows.read().reshape(-1, shape[1]) ^ _SIGN, shape)
        return _fields(_words(self.zero.rows).T, self.bits)[:, : shape[0]].T

    def integers(self) -> Callable[[int, int], U8]:
        return self._rows

    def _rows(self, start: int, stop: int) -> U8:
        rows = self.weight.rows[start:stop]
        return (
            rows.read() ^ _SIGN if self.weight.dtype == "I8" else _fields(_words(rows), self.bits)[:, : self.shape[1]]
        )


@dataclass(frozen=True, eq=False)
class _IntegerColumns(IntegerMatrix):
    """zero: not None. zero_offset: what is added to stored zero points. is_awq: whether words are along ``out``."""

    zero_offset: int
    is_awq: bool

    def scales(self) -> F32:
        return scales_of(self.scale).T

    def zeros(self) -> U8:
        assert self.zero is not None
        stored = self._unpack(_words(self.zero.rows))[:, : self.shape[0]]
        return (stored + np.uint8(self.zero_offset) & np.uint8((1 << self.bits) - 1)).T

    def integers(self) -> Callable[[int, int], U8]:
        return partial(self._of_awq if self.is_awq else self._of_gptq, _words(self.weight.rows))

    def _unpack(self, words: Words) -> U8:
        return _fields(words, self.bits, _AWQ_ORDER if self.is_awq else None)

    def _of_gptq(self, words: Words, start: int, stop: int) -> U8:
        return self._unpack(np.ascontiguousarray(words[:, start:stop].T))

    def _of_awq(self, words: Words, start: int, stop: int) -> U8:
        first = start // 8
        columns = self._unpack(np.ascontiguousarray(words[:, first : ceil(stop / 8)].T))
        rows = columns.reshape(len(columns), -1, 8).swapaxes(1, 2).reshape(-1, self.shape[1])
        return rows[start - first * 8 : stop - first * 8]


def _words(rows: FileRows) -> Words:
    return rows.read().view("<u4")


def _fields(words: Words, bits: int, order: Sequence[int] | None = None) -> U8:
    """Return the integers of words [n, m] as [n, m · 32 / bits], of each word in this order of places."""
    places = order or range(32 // bits)
    out = np.empty((*words.shape, len(places)), np.uint8)
    for i, place in enumerate(places):
        out[..., i] = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return out.reshape(len(words), -1)


def integer_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by AWQ, GPTQ or AutoRound. Raise ModelError if one is not complete, or if its
    tensors do not fit.
    """
    name_of_method = {"auto-round": "AutoRound"}.get(method, method.upper())
    if method == "auto-round":
        one_of(settings, "data_type", "int", ("int",))
        packings = ("auto_round:auto_gptq", "auto_round:auto_awq")
        method = one_of(settings, "packing_format", packings[0], packings).removeprefix("auto_round:auto_")
    bits, group_size, zero_offset = _format(settings, method)
    is_awq, is_sorted = method == "awq", settings.get("quantization_config.desc_act", bool, False)
    per_word = 32 // bits
    for name, weight in entries.items():
        if not name.endswith(".qweight"):
            continue
        stem = name.removesuffix("qweight")
        part(entries, weight, name, "I32")
        zero = part(entries, weight, stem + "qzeros", "I32")
        scale = part(entries, weight, stem + "scales", "float")
        has_index = not is_awq and (is_sorted or stem + "g_idx" in entries)
        g_idx = part(entries, weight, stem + "g_idx", "I32") if has_index else None
        if len(weight.shape) != 2:
            raise weight.error(f"shape {weight.shape} is not of a matrix", SAME_MODEL)
        first, last = weight.shape
        shape = (last * per_word, first) if is_awq else (last, first * per_word)
        matrix = _IntegerColumns(
            name_of_method, bits, group_size, shape, weight, scale, zero, g_idx, zero_offset=zero_offset, is_awq=is_awq
        )
        count = matrix.num_groups
        matrix.check(zero=(count, ceil(shape[0] / per_word)), scale=(count, shape[0]))
        yield Found(stem + "weight", matrix, matrix.parts)


def _format(settings: Config, method: str) -> tuple[int, int, int]:
    """Return bits, the size of groups (0: one of all columns), and what is added to stored zero points."""
    bits = settings.size("quantization_config.bits", most=32)
    if bits != 4 and (method, bits) != ("gptq", 8):
        what = f"quantization_config.bits is {bits}, which is not supported for {method}"
        raise settings.error(what, f"Use a checkpoint of 4 {'or 8 ' * (method == 'gptq')}bit")
    size = settings.get("quantization_config.group_size", int)
    if size != -1 and not 0 < size <= MOST_COLUMNS:
        raise settings.error(f"quantization_config.group_size is {size}, not a number of columns or -1", FETCH_AGAIN)
    if method == "gptq":
        form = one_of(settings, "format", "gptq", _GPTQ)
        version = one_of(settings, "checkpoint_format", form, _GPTQ)
        if version != form and settings.value("quantization_config.format") is not None:
            what = f"quantization_config.format is {form!r}, checkpoint_format is {version!r}"
            raise settings.error(what, USE_ITS_CONFIG)
        return bits, max(size, 0), int(version == "gptq")
    for key in ("version", "format", "checkpoint_format"):
        one_of(settings, key, "gemm", ("gemm",))
    if not settings.get("quantization_config.zero_point", bool, True):
        raise settings.error("quantization_config.zero_point = false is not supported", "Use one with zero points")
    return bits, max(size, 0), 0
