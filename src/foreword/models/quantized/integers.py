"""AWQ and GPTQ: w[o, i] = scales[g, o] · (q[i, o] − z[g, o]) for column i in group g, with unsigned q and z.

q and z are packed into words of 32 bits, lowest bits first: those of AWQ along ``out``, eight of them in the order
0 2 4 6 1 3 5 7; those of GPTQ along ``in`` (q) and ``out`` (z). g is i // group_size, or g_idx[i] where GPTQ sorted the
columns before it made groups. GPTQ stores z − 1, its second version z.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import numpy.typing as npt

from foreword.arrays import I64, U8
from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.quantized.matrix import SAME_MODEL, Found, encoded, in_chunks, one_of, part, scales_of
from foreword.models.quants import Quant, pack_q4, pack_q8
from foreword.models.safetensors import Entry

Words = npt.NDArray[np.uint32]
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The places of columns 0 to 7 in a word."""


@dataclass(frozen=True, slots=True)
class _Format:
    """zero_offset: what is added to stored zero points. group_size: 0 for one group of all columns."""

    method: str
    bits: int
    group_size: int
    zero_offset: int

    @property
    def per_word(self) -> int:
        """The number of integers in a word."""
        return 32 // self.bits

    def unpack(self, words: Words) -> U8:
        """Return the integers of words, uint8 [n, m, integers of a word] of [n, m]."""
        order = _AWQ_ORDER if self.method == "awq" else range(self.per_word)
        out = np.empty((*words.shape, self.per_word), np.uint8)
        for i, position in enumerate(order):
            out[..., i] = words >> np.uint32(self.bits * position) & np.uint32((1 << self.bits) - 1)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _IntegerMatrix:
    """g_idx: None if groups are of adjacent columns. quant: see `_quant`."""

    format: _Format
    qweight: Entry
    qzeros: Entry
    scales: Entry
    g_idx: Entry | None
    shape: tuple[int, int]
    quant: Quant = Quant.F32

    @property
    def source(self) -> str:
        size = self.format.group_size
        groups = f"groups of {size}" if size else "one group"
        of_any = "" if self.block_groups() is not None or self.shape[1] % 32 else " of any columns"
        return f"{self.format.method.upper()} ({self.format.bits} bit, {groups}{of_any})"

    def groups(self) -> I64:
        """Return the group of each column."""
        if self.g_idx is None:
            return np.arange(self.shape[1]) // (self.format.group_size or self.shape[1])
        return self.g_idx.rows.read().view("<i4").ravel().astype(np.int64)

    def block_groups(self) -> I64 | None:
        """Return the group of each block of 32 columns; None unless each is in one group."""
        groups = self.groups()
        if len(groups) % 32:
            return None
        blocks = groups.reshape(-1, 32)
        return blocks[:, 0] if (blocks == blocks[:, :1]).all() else None

    def zeros(self) -> U8:
        """Return the zero points, uint8 [groups, out]."""
        words = _words(self.qzeros)
        stored = self.format.unpack(words).reshape(len(words), -1)[:, : self.shape[0]]
        return stored + np.uint8(self.format.zero_offset) & np.uint8((1 << self.format.bits) - 1)

    def integers(self, words: Words, start: int, stop: int) -> U8:
        """Return q of rows [start, stop), uint8 [rows, in], of all words."""
        if self.format.method == "gptq":
            return self.format.unpack(np.ascontiguousarray(words[:, start:stop].T)).reshape(stop - start, -1)
        first = start // self.format.per_word
        some = np.ascontiguousarray(words[:, first : ceil(stop / self.format.per_word)].T)
        rows = self.format.unpack(some).swapaxes(1, 2).reshape(-1, self.shape[1])
        skipped = start - first * self.format.per_word
        return rows[skipped : skipped + stop - start]

    def convert(self, start: int, stop: int) -> U8:
        words, groups, blocks = _words(self.qweight), self.groups(), self.block_groups()
        scales, zeros = np.ascontiguousarray(scales_of(self.scales).T), np.ascontiguousarray(self.zeros().T)

        def rows(first: int, last: int) -> U8:
            q, scale, zero = self.integers(words, first, last), scales[first:last], zeros[first:last]
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


def _words(entry: Entry) -> Words:
    return entry.rows.read().view("<u4")


def integer_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by AWQ or GPTQ. Raise ModelError if one is not complete, or if its tensors do
    not fit.
    """
    kind = _format(settings, method)
    for name, qweight in entries.items():
        if name.endswith(".qweight"):
            stem = name.removesuffix("qweight")
            part(entries, qweight, name, "I32")
            qzeros = part(entries, qweight, stem + "qzeros", "I32")
            scales = part(entries, qweight, stem + "scales", "float")
            has_index = method == "gptq" and stem + "g_idx" in entries
            g_idx = part(entries, qweight, stem + "g_idx", "I32") if has_index else None
            matrix = _IntegerMatrix(kind, qweight, qzeros, scales, g_idx, _shape(kind, qweight))
            _check(matrix)
            parts = (qweight, qzeros, scales) if g_idx is None else (qweight, qzeros, scales, g_idx)
            yield Found(stem + "weight", replace(matrix, quant=_quant(matrix)), parts)


def _format(settings: Config, method: str) -> _Format:
    bits = settings.size("quantization_config.bits", most=32)
    if bits != 4 and (method, bits) != ("gptq", 8):
        what = f"quantization_config.bits is {bits}, which is not supported for {method}"
        raise settings.error(what, f"Use a checkpoint of 4 {'or 8 ' * (method == 'gptq')}bit")
    size = settings.get("quantization_config.group_size", int)
    if size != -1 and not 0 < size < 1 << 28:
        raise settings.error(f"quantization_config.group_size is {size}, not a number of columns or -1", FETCH_AGAIN)
    if method == "gptq":
        version = one_of(settings, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
        return _Format(method, bits, max(size, 0), int(version == "gptq"))
    for key in ("version", "format", "checkpoint_format"):
        one_of(settings, key, "gemm", ("gemm",))
    if not settings.get("quantization_config.zero_point", bool, True):
        raise settings.error("quantization_config.zero_point = false is not supported", "Use one with zero points")
    return _Format(method, bits, max(size, 0), 0)


def _shape(kind: _Format, qweight: Entry) -> tuple[int, int]:
    if len(qweight.shape) != 2:
        raise qweight.error(f"shape {qweight.shape} is not of a matrix", SAME_MODEL)
    first, last = qweight.shape
    return (last * kind.per_word, first) if kind.method == "awq" else (last, first * kind.per_word)


def _check(matrix: _IntegerMatrix) -> None:
    """Raise ModelError if shapes do not fit each other, a scale is not a number, or a group does not exist."""
    rows, columns = matrix.shape
    count = ceil(columns / (matrix.format.group_size or columns))
    zeros = count, ceil(rows / matrix.format.per_word)
    for entry, shape in ((matrix.qzeros, zeros), (matrix.scales, (count, rows)), (matrix.g_idx, (columns,))):
        if entry is not None and entry.shape != shape:
            what = f"shape {entry.shape} does not fit a matrix {matrix.shape} of {count} groups: expected {shape}"
            raise entry.error(what, SAME_MODEL)
    scales_of(matrix.scales)
    groups = matrix.groups()
    if matrix.g_idx is not None and (groups.min() < 0 or groups.max() >= count):
        raise matrix.g_idx.error(f"a group is not from 0 to {count - 1}")


def _quant(matrix: _IntegerMatrix) -> Quant:
    """Return the format that represents the matrix best."""
    if matrix.shape[1] % 32:
        return Quant.F32
    if matrix.format.bits == 8 or matrix.block_groups() is None:
        return Quant.Q8_0
    return Quant.Q4_0 if (matrix.zeros() == 8).all() else Quant.Q4_1
