"""HQQ: w = (q − zero) · scale, with unsigned q of 1, 2, 4 or 8 bits.

NAME.W_q has the numbers of rows [0, out / n) in the highest bits of its bytes, those of the next as many rows in the
next bits, and so on; n are the numbers of a byte. Its dtype may be any. NAME.scale and NAME.zero have a number for each
group: of ``group_size`` columns of a row (axis 1), or, for each column, of every (out / group_size)-th row (axis 0).
The other tensors are settings of the matrix: numbers, and texts as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foreword.arrays import F32, U8
from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.quantized.affine import AffineMatrix, Factors
from foreword.models.quantized.matrix import SAME_MODEL, WITHOUT_IT, Found, check_unread, checked, part, scales_of
from foreword.models.safetensors import Entry

_BITS = (1, 2, 4, 8)
_WEIGHTS = ".W_q"
_UNSUPPORTED = ("quant_scale", "quant_zero")
_WITHOUT_EFFECT = (
    *("packing", "unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
"""Settings that follow from the others, and those of how a matrix was made or is computed elsewhere."""
_OF_WEIGHTS = "weight_quant_params"
_TYPES = {"I32": "<i4", "I64": "<i8", "U8": "|u1"}


@dataclass(frozen=True, eq=False)
class _HqqMatrix(AffineMatrix):
    """group_size: 1 if the groups are of rows. num_rows: different rows of scales."""

    weight: Entry
    scale: Entry
    zero: Entry
    num_rows: int

    @property
    def source(self) -> str:
        out = self.shape[0]
        groups = f"{self.group_size} columns" if self.num_rows == out else f"{out // self.num_rows} rows"
        return f"HQQ ({self.bits} bit, groups of {groups})"

    def factors(self) -> Factors:
        shape = self.num_rows, self.shape[1] // self.group_size
        scale = scales_of(self.scale).reshape(shape)
        bias = checked(self.zero, -self.zero.tensor().dequantize().reshape(shape) * scale)

        def of_rows(start: int, stop: int) -> tuple[F32, F32]:
            rows = np.arange(start, stop) % self.num_rows
            return scale[rows], bias[rows]

        return of_rows

    def integers(self, start: int, stop: int) -> U8:
        rows, columns = self.shape
        height = rows * self.bits // 8
        stored = replace(self.weight.rows, num_rows=height, row_bytes=columns)
        out = np.empty((stop - start, columns), np.uint8)
        for i in range(start // height, -(-stop // height)):
            first, last = max(start, i * height), min(stop, (i + 1) * height)
            shifted = stored[first - i * height : last - i * height].read() >> np.uint8(8 - self.bits * (i + 1))
            out[first - start : last - start] = shifted & np.uint8((1 << self.bits) - 1)
        return out


def hqq_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by HQQ. Raise ModelError for settings that are not supported, and if tensors
    do not fit them.
    """
    _check(settings)
    for name, weight in entries.items():
        if not name.endswith(_WEIGHTS):
            continue
        stem = name.removesuffix("W_q")
        scale, zero = (part(entries, weight, stem + key, "float") for key in ("scale", "zero"))
        for key in _UNSUPPORTED:
            if (flag := entries.get(stem + key)) is not None and flag.rows.read().any():
                raise flag.error("scales and zero points that are quantised are not supported", WITHOUT_IT)
        (bits,), (group_size,), (axis,), shape = (
            _setting(entries, weight, stem + key, count)
            for key, count in (("nbits", 1), ("group_size", 1), ("axis", 1), ("shape", 2))
        )
        if bits not in _BITS:
            fix = f"Use a checkpoint of {', '.join(map(str, _BITS))} bit"
            raise entries[f"{stem}nbits"].error(f"{bits} bit are not supported", fix)
        matrix = _matrix(weight, scale, zero, bits, group_size, axis, shape)
        others = (entries.get(stem + key) for key in (*_UNSUPPORTED, *_WITHOUT_EFFECT))
        used = (entries[stem + key] for key in ("nbits", "group_size", "axis", "shape"))
        parts = (weight, scale, zero, *used, *(entry for entry in others if entry is not None))
        yield Found(f"{stem}weight", matrix, parts)


def _matrix(
    weight: Entry, scale: Entry, zero: Entry, bits: int, group_size: int, axis: int, shape: list[int]
) -> _HqqMatrix:
    """Raise ModelError unless the tensors of a matrix fit its settings."""
    what = f"shape {shape}, {bits} bit, groups of {group_size} along axis {axis}"
    fits = axis in (0, 1) and group_size > 0 and min(shape) > 0
    fits = fits and weight.rows.nbytes * 8 == shape[0] * shape[1] * bits and shape[0] * bits % 8 == 0
    if not fits or shape[axis] % group_size:
        raise weight.error(f"shape {weight.shape} does not fit {what}", SAME_MODEL)
    count = shape[0] * shape[1] // group_size
    for entry in (scale, zero):
        if entry.rows.nbytes != count * entry.tensor().quant.block_bytes:
            raise entry.error(f"shape {entry.shape} does not fit {what}", SAME_MODEL)
    columns, num_rows = (group_size, shape[0]) if axis == 1 else (1, shape[0] // group_size)
    return _HqqMatrix(bits, columns, (shape[0], shape[1]), weight, scale, zero, num_rows)


def _setting(entries: Mapping[str, Entry], weight: Entry, name: str, count: int) -> list[int]:
    """Return a setting of a matrix. Raise ModelError unless it is there, as so many integers."""
    found = entries.get(name)
    if found is None:
        raise weight.error(f"comes without {name}")
    if found.dtype not in _TYPES:
        raise found.error(f"dtype is {found.dtype}, expected {', '.join(_TYPES)}")
    numbers: list[int] = found.rows.read().view(_TYPES[found.dtype]).ravel().tolist()
    if len(numbers) != count:
        raise found.error(f"has {len(numbers)} numbers, expected {count}")
    return numbers


def _check(settings: Config) -> None:
    """Raise ModelError for a key that is not known, and for scales that are quantised. The tensors have all else."""
    key = "quantization_config.quant_config"
    given = settings.value(key)
    if not isinstance(given, dict):
        raise settings.error(f"{key} is {given!r:.80}, not a JSON object", FETCH_AGAIN)
    for name, group in [("", given)] if _OF_WEIGHTS in given else given.items():
        if group is None:
            continue
        weights = group.get(_OF_WEIGHTS) if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise settings.error(f"{key} {name!r:.80} is {group!r:.80}, not an object with {_OF_WEIGHTS}", FETCH_AGAIN)
        own = Config(settings.path, group, part=f"{key} {name:.80}: ")
        check_unread(own, (_OF_WEIGHTS, "offload_meta"), WITHOUT_IT)
        known = ("nbits", "group_size", "axis", "view_as_float", "channel_wise", "optimize", "round_zero")
        check_unread(Config(settings.path, weights, part=f"{key} {name:.80}: {_OF_WEIGHTS}: "), known, WITHOUT_IT)
