"""The base of quantised formats: rows that are converted when they are read, and checks of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.config import Config
from foreword.models.quants import Quant, quantize_q8
from foreword.models.safetensors import Entry
from foreword.models.weights import Tensor

SAME_MODEL = "Use configuration and weights of the same model"
WITHOUT_IT = "Use a checkpoint without it"
MOST_COLUMNS = 1 << 28
LARGEST_SCALE = 4096
"""Times an integer of 4 bits, or times the largest e4m3 over 127, this is a float16."""
EXPONENTS = ("U8", "F8_E8M0")
"""The dtypes of scales that are powers of two."""
_CHUNK = 1 << 17  # weights converted at once, so that temporaries fit into the CPU cache


class Matrix(Protocol):
    """A quantised matrix [out, in]. source: its format, in words; quant: the format that it is converted to."""

    @property
    def source(self) -> str: ...

    @property
    def quant(self) -> Quant: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def convert(self, start: int, stop: int) -> U8:
        """Return rows [start, stop) in ``quant``. Raise ModelError for a NaN."""


class Found(NamedTuple):
    """A matrix of a checkpoint: its name in the unquantised form, and the tensors that hold it. A `Tensor` has one of
    our formats already.
    """

    name: str
    matrix: Matrix | Tensor
    parts: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedRows:
    """Rows [start, stop) of a quantised matrix."""

    matrix: Matrix
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return len(self) * self.matrix.quant.row_bytes(self.matrix.shape[1])

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: slice) -> ConvertedRows:
        start, stop, _ = rows.indices(len(self))
        return ConvertedRows(self.matrix, self.start + start, self.start + max(start, stop))

    def read(self) -> U8:
        return self.matrix.convert(self.start, self.stop)


def of_8_bits(shape: tuple[int, int]) -> Quant:
    """Return the format of a matrix that becomes 8 bit: Q8_0, or F32 if its columns are not whole blocks."""
    return Quant.F32 if shape[1] % Quant.Q8_0.block_size else Quant.Q8_0


def encoded(values: F32, quant: Quant) -> U8:
    """Return float32 [rows, columns] in Q8_0 or F32, as [n, bytes]."""
    if quant is Quant.F32:
        return values.view(np.uint8)
    return quantize_q8(values.reshape(-1, 32))


def in_chunks(matrix: Matrix, start: int, stop: int, convert: Callable[[int, int], U8]) -> U8:
    """Return rows [start, stop), of which ``convert`` gives some, [first, last), in any shape."""
    columns = matrix.shape[1]
    out = np.empty((stop - start, matrix.quant.row_bytes(columns)), np.uint8)
    step = -(-_CHUNK // columns // 8) * 8
    for first in range(start, stop, step):
        last = min(first + step, stop)
        out[first - start : last - start] = convert(first, last).reshape(last - first, -1)
    return out


def scales_of(entry: Entry) -> F32:
    """Return the scales as float32; those of bytes are 2^(byte − 127). Raise ModelError unless all are finite and none
    is too large.
    """
    if entry.dtype in EXPONENTS:
        powers = np.ldexp(np.float32(1), entry.rows.read().astype(np.int32) - 127)
        return checked(entry, powers.reshape(entry.shape))
    return checked(entry, entry.tensor().dequantize())


def checked(entry: Entry, scales: F32) -> F32:
    """Return the scales that an entry stands for. Raise ModelError as `scales_of`."""
    good = np.abs(scales) <= LARGEST_SCALE
    if not good.all():
        raise entry.error(f"scale {scales[~good][0]} is not a number of at most {LARGEST_SCALE}")
    return scales


def part(entries: Mapping[str, Entry], whole: Entry, name: str, dtype: str) -> Entry:
    """Return a tensor that ``whole`` needs, of a dtype, of floats for "float", or of floats or exponents for "scale".

    Raise ModelError if it is not there.
    """
    found = entries.get(name)
    if found is None:
        raise whole.error(f"comes without {name}")
    is_one = found.is_float or (dtype == "scale" and found.dtype in EXPONENTS)
    if not is_one if dtype in ("float", "scale") else found.dtype != dtype:
        raise found.error(f"dtype is {found.dtype}, expected {dtype}")
    return found


def check_unread(settings: Config, without_effect: Collection[str], fix: str) -> None:
    """Raise ModelError for a key with a value that was not read, and is not among those without effect. A key that is
    null, false or empty asks for nothing.
    """
    for key, value in settings.values.items():
        is_asked = bool(value) or type(value) in (int, float)
        if is_asked and key not in settings.read and key.removeprefix("quantization_config.") not in without_effect:
            raise settings.error(f"{key} = {value!r:.80} is not supported", fix)


def one_of(settings: Config, key: str, default: str, supported: tuple[str, ...]) -> str:
    """Return a text of ``quantization_config`` in lower case. Raise ModelError if it is not supported."""
    value = settings.get(f"quantization_config.{key}", str, default).lower()
    if value not in supported:
        what = f"quantization_config.{key} is {value!r:.80}, which is not supported"
        raise settings.error(what, f"Use a checkpoint of {', '.join(supported)}, or an unquantised one")
    return value
