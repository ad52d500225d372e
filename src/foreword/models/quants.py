"""Number formats of weights, and their exact meaning as float32.

A quantised row is a sequence of blocks of ``block_size`` weights in ``block_bytes`` bytes. With d, m (float16) the
scale and offset of a block and q an unsigned integer made of a nibble (or byte) and, in the wider formats, of high bits
kept apart, a weight is

    Q4_0  d (q − 8)      Q5_0  d (q − 16)      Q8_0  d q (q signed)      Q4_1, Q5_1  d q + m

The K formats hold 256 weights in sub-blocks of 16 or 32, whose scales (and offsets) are small integers themselves:

    Q2_K  d s q − m o    Q4_K, Q5_K  d s q − m o    Q3_K  d s (q − 4)    Q6_K  d s (q − 32)

MXFP4 has blocks of 32 with a scale 2^(e − 128) of one byte e; its weights are the scale times 0, 1, 2, 3, 4, 6, 8 or
12, positive or negative. TQ1_0 and TQ2_0 have blocks of 256; their weights are d (q − 1), with q of 0, 1 and 2.

Layouts are those of the GGUF file format; the docstring of each function below shows one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, U8

_CHUNK = 1 << 18  # weights decoded at once, so that temporaries fit into the CPU cache


class Quant(Enum):
    """A number format: its type number in GGUF files, weights per block, bytes per block."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    TQ1_0 = (34, 256, 54)
    TQ2_0 = (35, 256, 66)
    MXFP4 = (39, 32, 17)

    def __init__(self, ggml_type: int, block_size: int, block_bytes: int) -> None:
        self.ggml_type, self.block_size, self.block_bytes = ggml_type, block_size, block_bytes

    def row_bytes(self, num_columns: int) -> int:
        """Return bytes of a row of this many weights. Raise ValueError unless ``num_columns`` is a whole number of
        blocks.
        """
        if num_columns % self.block_size:
            raise ValueError(f"{num_columns} columns are not a multiple of the {self.name} block, {self.block_size}")
        return num_columns // self.block_size * self.block_bytes


def dequantize(data: U8, quant: Quant) -> F32:
    """Return weights as float32: uint8 [..., row_bytes] → float32 [..., row_bytes / block_bytes * block_size].

    Equal bit for bit to the formulas above evaluated in float32. Raise ValueError if a row is not a whole number of
    blocks.
    """
    if data.shape[-1] % quant.block_bytes:
        reason = f"is not a whole number of {quant.name} blocks of {quant.block_bytes} bytes"
        raise ValueError(f"a row of {data.shape[-1]} bytes {reason}")
    blocks = np.ascontiguousarray(data).reshape(-1, quant.block_bytes)
    out = np.empty((len(blocks), quant.block_size), np.float32)
    step = max(1, _CHUNK // quant.block_size)
    decode = _DECODERS[quant]
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(*data.shape[:-1], data.shape[-1] // quant.block_bytes * quant.block_size)


def grid_of(data: U8, quant: Quant) -> tuple[F32, F32] | None:
    """Return, for a format with 4 bits, the step s and the smallest weight m of every 32 weights: a weight is m + s n
    for an n below 16.
    uint8 [rows, row_bytes] → two float32 [rows, columns / 32]. Another format gives None.
    """
    b = np.ascontiguousarray(data).reshape(-1, quant.block_bytes)
    match quant:
        case Quant.Q4_0:
            step = _f16(b, 0)
            least = -8 * step
        case Quant.Q4_1:
            step, least = _f16(b, 0), _f16(b, 2)
        case Quant.Q4_K:
            s, o = _scales_and_offsets(b[:, 4:16])
            step, least = _f16(b, 0) * s, -_f16(b, 2) * o
        case Quant.TQ1_0 | Quant.TQ2_0:
            step = _f16(b, -2).repeat(8, axis=1)
            least = -step
        case _:
            return None
    return step.reshape(len(data), -1), least.reshape(len(data), -1)


def pack_q4(q: U8, scale: F32, offset: F32 | None = None) -> U8:
    """Return blocks of integers below 16 [n, 32] and their d and m [n] as Q4_1, uint8 [n, 20]; without m as Q4_0 [n,
    18].
    """
    fields = [scale] if offset is None else [scale, offset]
    return np.concatenate([*(_as_f16(field) for field in fields), q[:, :16] | q[:, 16:] << np.uint8(4)], axis=1)


def ternary_as_q4(data: U8, quant: Quant) -> U8:
    """Return rows in TQ1_0 or TQ2_0, uint8 [rows, row_bytes], as rows in Q4_0 of equal weights."""
    blocks = np.ascontiguousarray(data).reshape(-1, quant.block_bytes)
    q = _ternary(blocks).reshape(-1, 32) + np.uint8(7)
    return pack_q4(q, _f16(blocks, -2).repeat(8)).reshape(len(data), -1)


def pack_q8(q: npt.NDArray[np.int8], scale: F32 | npt.NDArray[np.float16]) -> U8:
    """Return blocks of integers [n, 32] and their d [n] as Q8_0, uint8 [n, 34]."""
    return np.concatenate([_as_f16(scale), q.view(np.uint8)], axis=1)


def quantize_q8(values: F32) -> U8:
    """Return the nearest Q8_0 blocks, uint8 [n, 34], of float32 [n, 32]: d is the largest magnitude / 127, rounded up,
    and no weight changes by more than d/2. A block with a value that is not finite has a d that is not finite.
    """
    least = np.abs(values).max(axis=1) / np.float32(127)
    scale = least.astype(np.float16)
    scale = np.where(scale < least, np.nextafter(scale, np.float16(np.inf)), scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(least), where=scale > 0, dtype=np.float32)
    return pack_q8(np.rint(values * inverse[:, None]).astype(np.int8), scale)


def _as_f16(field: F32 | npt.NDArray[np.float16]) -> U8:
    """Return float [n] as the bytes of float16, uint8 [n, 2]."""
    return field.astype("<f2").view(np.uint8).reshape(-1, 2)


def _f16(blocks: U8, at: int) -> F32:
    """Return the float16 at byte ``at`` of every block, −2 for its end, as float32 [n, 1]."""
    return blocks[:, at : at + 2 or None].view("<f2").astype(np.float32)


def _halves(nibbles: U8) -> U8:
    """Split [n, g, w] into [n, 2 g, w]: of each group first the low nibbles, then the high ones."""
    n, g, w = nibbles.shape
    out = np.empty((n, g, 2, w), np.uint8)
    np.bitwise_and(nibbles, 15, out=out[:, :, 0])
    np.right_shift(nibbles, 4, out=out[:, :, 1])
    return out.reshape(n, 2 * g, w)


def _bits(data: U8, width: int) -> U8:
    """Split [n, g, w] into [n, g · 8/width, w]: of each group the bit fields of ``width`` bits, lowest first."""
    n, _, w = data.shape
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (data[:, :, None, :] >> shifts & np.uint8((1 << width) - 1)).reshape(n, -1, w)


def _f32_block(b: U8, out: F32) -> None:
    out[:] = b.view("<f4")


def _f16_block(b: U8, out: F32) -> None:
    out[:] = b.view("<f2")


def _bf16_block(b: U8, out: F32) -> None:
    out.view(np.uint32)[:] = b.view("<u2").astype(np.uint32) << 16


def _q8_0(b: U8, out: F32) -> None:
    """Decode | d | 32 × int8 |."""
    np.multiply(b[:, 2:].view(np.int8), _f16(b, 0), out=out)


def _nibbles(*, offset: bool, fifth: bool) -> Callable[[U8, F32], None]:
    """Decode | d | m if ``offset`` | 32 bits if ``fifth`` | 16 bytes: low nibbles are weights 0…15, high nibbles 16…31
    |.

    Bit i of the 32, little-endian, is the fifth bit of weight i. Weights are signed without an offset.
    """
    bits = 4 if offset else 2
    start = bits + 4 if fifth else bits

    def decode(b: U8, out: F32) -> None:
        q = _halves(b[:, None, start:]).reshape(-1, 32)
        if fifth:
            q |= np.unpackbits(b[:, bits:start], axis=1, bitorder="little") << np.uint8(4)
        np.multiply(q if offset else q.view(np.int8) - np.int8(16 if fifth else 8), _f16(b, 0), out=out)
        if offset:
            out += _f16(b, 2)

    return decode


def _scales_and_offsets(s: U8) -> tuple[U8, U8]:
    """Split 12 bytes into eight 6-bit scales and eight 6-bit offsets, two [n, 8].

    Bytes 0…3 hold scales 0…3 and bytes 4…7 offsets 0…3 in their low six bits; bytes 8…11 hold the low nibbles of
    scales 4…7 (low half) and offsets 4…7 (high half), whose upper two bits are those left over in bytes 0…3 and 4…7.
    """
    low, left = s[:, :8] & 63, s[:, :8] >> 6 << 4
    scales = np.concatenate([low[:, :4], s[:, 8:] & 15 | left[:, :4]], axis=1)
    offsets = np.concatenate([low[:, 4:], s[:, 8:] >> 4 | left[:, 4:]], axis=1)
    return scales, offsets


def _scaled(out: F32, q: npt.NDArray[np.uint8 | np.int8], scale: F32, offset: F32 | None = None) -> None:
    """Return scale · q − offset with one scale and offset per sub-block: q [n, g, w], scale and offset [n, g]."""
    grouped = out.reshape(q.shape)
    np.multiply(q, scale[:, :, None], out=grouped)
    if offset is not None:
        grouped -= offset[:, :, None]


def _q4_k(b: U8, out: F32) -> None:
    """Decode | d | m | 12 bytes of scales and offsets | 4 × 32 bytes: low nibbles 32 weights, high nibbles the next 32
    |.

    Q5_K has 32 bytes before the nibbles: bit g is the fifth of sub-block g.
    """
    s, o = _scales_and_offsets(b[:, 4:16])
    q = _halves(b[:, -128:].reshape(-1, 4, 32))
    if b.shape[1] == Quant.Q5_K.block_bytes:
        q |= _bits(b[:, None, 16:48], 1) << np.uint8(4)
    _scaled(out, q, _f16(b, 0) * s, _f16(b, 2) * o)


def _q2_k(b: U8, out: F32) -> None:
    """Decode | 16 bytes: scale in the low nibble, offset in the high | 2 × 32 bytes of four 2-bit planes | d | m |."""
    q = _bits(b[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    _scaled(out, q, _f16(b, 80) * (b[:, :16] & 15), _f16(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: U8, out: F32) -> None:
    """Decode | 32 bytes: bit g is the third of sub-block g | 2-bit planes as in Q2_K | 12 bytes: 16 scales + 32 | d |.

    Scale i: low nibble in byte i mod 8 (i < 8: its low half), upper two bits in byte 8 + i mod 4, field i // 4.
    """
    s = b[:, 96:108]
    scale = _halves(s[:, None, :8]).reshape(-1, 16) | _bits(s[:, None, 8:], 2).reshape(-1, 16) << np.uint8(4)
    q = _bits(b[:, 32:96].reshape(-1, 2, 32), 2) | _bits(b[:, None, :32], 1) << np.uint8(2)
    signed = (q.view(np.int8) - np.int8(4)).reshape(-1, 16, 16)
    _scaled(out, signed, _f16(b, 108) * (scale.view(np.int8) - np.int8(32)))


def _q6_k(b: U8, out: F32) -> None:
    """Decode | 2 × 64 bytes: low nibbles 64 weights, high ones the next 64 | 2 × 32 bytes of 2-bit planes | 16 int8 | d
    |.
    """
    low = _halves(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    q = low | _bits(b[:, 128:192].reshape(-1, 2, 32), 2) << np.uint8(4)
    signed = (q.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    _scaled(out, signed, _f16(b, 208) * b[:, 192:208].view(np.int8))


FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""The weights of MXFP4 by their 4 bits, times 2."""


def _mxfp4(b: U8, out: F32) -> None:
    """Decode | e | 16 bytes: low nibbles are weights 0…15, high nibbles 16…31 |."""
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    np.multiply(FP4[_halves(b[:, None, 1:]).reshape(-1, 32)], scale, out=out)


def _ternary(b: U8) -> U8:
    """Return the integers 0, 1 and 2 of blocks in TQ1_0 or TQ2_0, uint8 [n, 256].

    | bytes of integers | d |. TQ2_0 has two bits each: 2 × 32 bytes of four 2-bit planes. TQ1_0 has digits of base 3,
    most significant first, of a byte as a fraction of 256: five planes of 32 bytes, five of 16, then four of 4.
    """
    if b.shape[1] == Quant.TQ2_0.block_bytes:
        return _bits(b[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    parts = ((b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4))
    digits = [(part[:, None] * _POWERS[:count, None]).astype(np.uint16) * np.uint16(3) >> 8 for part, count in parts]
    return np.concatenate([part.reshape(len(b), -1) for part in digits], axis=1).astype(np.uint8)


_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def _ternary_block(b: U8, out: F32) -> None:
    np.multiply(_ternary(b).view(np.int8) - np.int8(1), _f16(b, -2), out=out)


_DECODERS: dict[Quant, Callable[[U8, F32], None]] = {
    Quant.F32: _f32_block,
    Quant.F16: _f16_block,
    Quant.BF16: _bf16_block,
    Quant.Q4_0: _nibbles(offset=False, fifth=False),
    Quant.Q4_1: _nibbles(offset=True, fifth=False),
    Quant.Q5_0: _nibbles(offset=False, fifth=True),
    Quant.Q5_1: _nibbles(offset=True, fifth=True),
    Quant.Q8_0: _q8_0,
    Quant.Q2_K: _q2_k,
    Quant.Q3_K: _q3_k,
    Quant.Q4_K: _q4_k,
    Quant.Q5_K: _q4_k,
    Quant.Q6_K: _q6_k,
    Quant.TQ1_0: _ternary_block,
    Quant.TQ2_0: _ternary_block,
    Quant.MXFP4: _mxfp4,
}
