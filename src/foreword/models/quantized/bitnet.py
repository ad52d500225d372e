"""BitNet: w[o, i] = s · t[o, i], with t of −1, 0 and 1, and one s for each matrix.

| linear_class  | quantization_mode | weight                           | s                                |
|---------------|-------------------|----------------------------------|----------------------------------|
| bitlinear     | either            | t + 1, packed                    | 1 / weight_scale                 |
| autobitlinear | offline           | t + 1, packed, or t as floats    | weight_scale                     |
| autobitlinear | online            | floats v, with t = round(v / s)  | mean(|v|), at least 1e-5         |

Packed: byte [r, i] of [out / 4, in] has rows r, r + out / 4, r + 2 out / 4 and r + 3 out / 4, two bits each, lowest
bits first. Of floats v, t is limited to −1 and 1, and w is rounded to their type.

The inputs of these products are rounded to 8 bits, with a scale for each token: `DecoderSpec.rounds_inputs`. All
products of layers have such matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.config import Config
from foreword.models.quantized.matrix import LARGEST_SCALE, SAME_MODEL, Found, encoded, in_chunks, one_of, part
from foreword.models.quants import Quant, dequantize, pack_q4
from foreword.models.safetensors import Entry

_AT_ONCE = 256
"""Rows whose magnitudes are added up at once."""
_OUTSIDE = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of matrices that are never quantised."""


class _Ternary(ABC):
    """See `Matrix`. quant: Q4_0, or F32 if the columns are not a multiple of 32."""

    form: str

    def __init__(self, weight: Entry, rows: int) -> None:
        if len(weight.shape) != 2:
            raise weight.error(f"shape {weight.shape} is not of a matrix", SAME_MODEL)
        self.weight, self.shape = weight, (rows, weight.shape[1])
        self.quant = Quant.F32 if self.shape[1] % 32 else Quant.Q4_0

    @property
    def source(self) -> str:
        return f"BitNet ({self.form})"

    @abstractmethod
    def scale(self) -> np.float32:
        """Return s."""

    @abstractmethod
    def integers(self, start: int, stop: int) -> U8:
        """Return t + 1 of rows [start, stop)."""

    def convert(self, start: int, stop: int) -> U8:
        scale = self.scale()

        def rows(first: int, last: int) -> U8:
            found = self.integers(first, last)
            if self.quant is Quant.F32:
                return encoded((found.astype(np.float32) - 1) * scale, self.quant)
            blocks = found.reshape(-1, 32)
            return pack_q4(blocks + np.uint8(7), np.full(len(blocks), scale))

        return in_chunks(self, start, stop, rows)


class _Offline(_Ternary):
    rows_of_one: int

    def __init__(self, weight: Entry, scale: np.float32) -> None:
        super().__init__(weight, self.rows_of_one * weight.shape[0])
        self._scale = scale

    def scale(self) -> np.float32:
        return self._scale


class _Packed(_Offline):
    form, rows_of_one = "packed", 4

    def integers(self, start: int, stop: int) -> U8:
        count, found = self.weight.shape[0], [np.empty((0, self.shape[1]), np.uint8)]
        for nth in range(start // count, -(-stop // count)):
            first, last = max(start - nth * count, 0), min(stop - nth * count, count)
            found.append(self.weight.rows[first:last].read() >> np.uint8(2 * nth) & np.uint8(3))
        integers = np.concatenate(found)
        if (integers == 3).any():
            raise self.weight.error("holds other numbers than -1, 0 and 1", SAME_MODEL)
        return integers


class _Unpacked(_Offline):
    form, rows_of_one = "not packed", 1

    def integers(self, start: int, stop: int) -> U8:
        values = _floats(self.weight, start, stop)
        if not np.isin(values, (-1, 0, 1)).all():
            raise self.weight.error("holds other numbers than -1, 0 and 1", SAME_MODEL)
        return (values + 1).astype(np.uint8)


class _Online(_Ternary):
    form = "of floats"

    def __init__(self, weight: Entry) -> None:
        super().__init__(weight, weight.shape[0])

    @cached_property
    def _inverse(self) -> np.float32:
        """Return 1 / max(mean(|v|), 1e-5), by which the reference multiplies, and divides again."""
        rows, columns = self.shape
        starts = range(0, rows, _AT_ONCE)
        total = sum(float(np.abs(_floats(self.weight, i, i + _AT_ONCE)).sum(dtype=np.float64)) for i in starts)
        return np.float32(1 / np.float32(max(total / (rows * columns), 1e-5)))

    def scale(self) -> np.float32:
        scale = np.float32(1 / self._inverse)
        if self.weight.dtype == "F32":
            return scale
        if self.weight.dtype == "F16":
            return np.float32(np.float16(scale))
        bits = int(scale.view(np.uint32))
        upper = np.array([bits + 0x7FFF + (bits >> 16 & 1) >> 16], "<u2")
        return np.float32(dequantize(upper.view(np.uint8), Quant.BF16)[0])

    def integers(self, start: int, stop: int) -> U8:
        rounded: F32 = np.rint(_floats(self.weight, start, stop) * self._inverse)
        return (np.clip(rounded, -1, 1) + 1).astype(np.uint8)


def bitnet_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a BitNet checkpoint: all but embeddings and the output projection. Raise ModelError if one
    is not complete, or if its numbers are not ternary.
    """
    classes, modes = ("bitlinear", "autobitlinear"), ("offline", "online")
    is_auto = one_of(settings, "linear_class", classes[0], classes) == classes[1]
    is_online = one_of(settings, "quantization_mode", modes[0], modes) == modes[1] and is_auto
    settings.value("quantization_config.rms_norm_eps")  # which use_rms_norm alone needs
    if settings.get("quantization_config.use_rms_norm", bool, False):
        raise settings.error("quantization_config.use_rms_norm = true is not supported", "Use a checkpoint without it")
    skipped = settings.sequence("quantization_config.modules_to_not_convert")
    if is_online and [*skipped] not in ([], ["lm_head"]):
        what = f"quantization_config.modules_to_not_convert = {skipped!r:.80} is not supported beside online"
        raise settings.error(what, "Use a packed checkpoint")
    for name, weight in entries.items():
        if len(weight.shape) != 2 or name.endswith(_OUTSIDE) or not name.endswith(".weight"):
            continue
        if is_online:
            yield Found(name, _Online(weight), (weight,))
            continue
        scale = part(entries, weight, f"{name}_scale", "float")
        kind = _Packed if weight.dtype == "U8" else _Unpacked
        yield Found(name, kind(weight, _scale(scale, is_inverse=not is_auto)), (weight, scale))


def _scale(entry: Entry, *, is_inverse: bool) -> np.float32:
    """Return s. Raise ModelError unless it is a number above 0 that a float16 can have."""
    values = entry.tensor().dequantize().ravel()
    scale = (np.float32(1) / values[0] if is_inverse else values[0]) if values.size == 1 and values[0] > 0 else np.nan
    if not np.float32(1e-7) <= scale <= LARGEST_SCALE:
        raise entry.error(f"scales {values[:4]} are not one number of a matrix, above 0 and at most {LARGEST_SCALE}")
    return np.float32(scale)


def _floats(entry: Entry, start: int, stop: int) -> F32:
    """Return rows of a matrix. Raise ModelError for a number that is not finite."""
    values = dequantize(entry.rows[start:stop].read(), entry.tensor().quant)
    if not np.isfinite(values).all():
        raise entry.error("holds a number that is not finite")
    return values
