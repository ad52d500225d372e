"""Number formats of weights, and their exact meaning as float32.

A quantised row is a sequence of blocks of ``block_size`` weights in ``block_bytes`` bytes. With d, m (float16) the
scale and offset of a block and q an unsigned integer made of a nibble (or byte) and, in the wider formats, of high bits
kept apart, a weight is

    Q4_0  d (q − 8)      Q5_0  d (q − 16)      Q8_0  d q (q signed)      Q4_1, Q5_1  d q + m

The K formats hold 256 weights in sub-blocks of 16 or 32, whose scales (and offsets) are small integers themselves:

    Q2_K  d s q − m o    Q4_K, Q5_K  d s q − m o    Q3_K  d s (q − 4)    Q6_K  d s (q − 32)

TQ1_0 and TQ2_0 have blocks of 256; their weights are d (q − 1), with q of 0, 1 and 2. The weights of the other formats
are scales times integers of tables: ``foreword.models.codebooks``.

Layouts are those of the GGUF file format; the docstring of each function below shows one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, U8
from foreword.models import codebooks
from foreword.models.blocks import bits, f16, halves

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
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    IQ3_S = (21, 256, 110)
    IQ3_XXS = (18, 256, 98)
    IQ2_S = (22, 256, 82)
    IQ2_XS = (17, 256, 74)
    IQ2_XXS = (16, 256, 66)
    IQ1_M = (29, 256, 56)
    IQ1_S = (19, 256, 50)
    NVFP4 = (40, 64, 36)
    Q1_0 = (41, 128, 18)

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
            step = f16(b, 0)
            least = -8 * step
        case Quant.Q4_1:
            step, least = f16(b, 0), f16(b, 2)
        case Quant.Q4_K:
            s, o = _scales_and_offsets(b[:, 4:16])
            step, least = f16(b, 0) * s, -f16(b, 2) * o
        case Quant.TQ1_0 | Quant.TQ2_0 | Quant.Q1_0:
            step = f16(b, 0 if quant is Quant.Q1_0 else -2).repeat(quant.block_size // 32, axis=1)
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


def pack_q5_1(q: U8, scale: F32, offset: F32) -> U8:
    """Return blocks of integers below 32 [n, 32] and their d and m [n] as Q5_1, uint8 [n, 24]."""
    packed = pack_q4(q & np.uint8(15), scale, offset)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")
    return np.concatenate([packed[:, :4], fifth, packed[:, 4:]], axis=1)


def repacked(data: U8, quant: Quant, form: Literal["Q4_0", "INT8_16", "INT8_32"]) -> U8:
    """Return rows in a format of `_INTEGERS`, uint8 [rows, row_bytes], as equal weights in another format.

    INT8_16 and INT8_32 have blocks of 16 and 32: d in float32, then the integers in 8 bit. Q4_0 must have the same
    integers, and scales in float16. The blocks must not have more weights than share a scale.
    """
    blocks = np.ascontiguousarray(data).reshape(-1, quant.block_bytes)
    width = 16 if form == "INT8_16" else 32
    parts = []
    for start in range(0, len(blocks), step := max(1, _CHUNK // quant.block_size)):
        q, d = _INTEGERS[quant](blocks[start : start + step])
        integers, scales = q.reshape(-1, width), d.repeat(q.shape[2] // width)
        if form == "Q4_0":
            parts.append(pack_q4((integers + np.int8(8)).view(np.uint8), scales))
        else:
            parts.append(np.concatenate([scales[:, None].view(np.uint8), integers.view(np.uint8)], axis=1))
    return np.concatenate(parts).reshape(len(data), -1)


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


def _f32_block(b: U8, out: F32) -> None:
    out[:] = b.view("<f4")


def _f16_block(b: U8, out: F32) -> None:
    out[:] = b.view("<f2")


def _bf16_block(b: U8, out: F32) -> None:
    out.view(np.uint32)[:] = b.view("<u2").astype(np.uint32) << 16


def _q8_0(b: U8, out: F32) -> None:
    """Decode | d | 32 × int8 |."""
    np.multiply(b[:, 2:].view(np.int8), f16(b, 0), out=out)


def _nibbles(*, offset: bool, fifth: bool) -> Callable[[U8, F32], None]:
    """Decode | d | m if ``offset`` | 32 bits if ``fifth`` | 16 bytes: low nibbles are weights 0…15, high nibbles 16…31
    |.

    Bit i of the 32, little-endian, is the fifth bit of weight i. Weights are signed without an offset.
    """
    first = 4 if offset else 2
    start = first + 4 if fifth else first

    def decode(b: U8, out: F32) -> None:
        q = halves(b[:, None, start:]).reshape(-1, 32)
        if fifth:
            q |= np.unpackbits(b[:, first:start], axis=1, bitorder="little") << np.uint8(4)
        np.multiply(q if offset else q.view(np.int8) - np.int8(16 if fifth else 8), f16(b, 0), out=out)
        if offset:
            out += f16(b, 2)

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
    q = halves(b[:, -128:].reshape(-1, 4, 32))
    if b.shape[1] == Quant.Q5_K.block_bytes:
        q |= bits(b[:, None, 16:48], 1) << np.uint8(4)
    _scaled(out, q, f16(b, 0) * s, f16(b, 2) * o)


def _q2_k(b: U8, out: F32) -> None:
    """Decode | 16 bytes: scale in the low nibble, offset in the high | 2 × 32 bytes of four 2-bit planes | d | m |."""
    q = bits(b[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    _scaled(out, q, f16(b, 80) * (b[:, :16] & 15), f16(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: U8) -> codebooks.Integers:
    """Decode | 32 bytes: bit g is the third of sub-block g | 2-bit planes as in Q2_K | 12 bytes: 16 scales + 32 | d |.

    Scale i: low nibble in byte i mod 8 (i < 8: its low half), upper two bits in byte 8 + i mod 4, field i // 4.
    """
    s = b[:, 96:108]
    scale = halves(s[:, None, :8]).reshape(-1, 16) | bits(s[:, None, 8:], 2).reshape(-1, 16) << np.uint8(4)
    q = bits(b[:, 32:96].reshape(-1, 2, 32), 2) | bits(b[:, None, :32], 1) << np.uint8(2)
    return (q.view(np.int8) - np.int8(4)).reshape(-1, 16, 16), f16(b, 108) * (scale.view(np.int8) - np.int8(32))


def _q6_k(b: U8, out: F32) -> None:
    """Decode | 2 × 64 bytes: low nibbles 64 weights, high ones the next 64 | 2 × 32 bytes of 2-bit planes | 16 int8 | d
    |.
    """
    low = halves(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    q = low | bits(b[:, 128:192].reshape(-1, 2, 32), 2) << np.uint8(4)
    signed = (q.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    _scaled(out, signed, f16(b, 208) * b[:, 192:208].view(np.int8))


def _ternary(b: U8) -> codebooks.Integers:
    """Decode | bytes of integers + 1 | d |.

    TQ2_0 has two bits each: 2 × 32 bytes of four 2-bit planes. TQ1_0 has digits of base 3, most significant first, of a
    byte as a fraction of 256: five planes of 32 bytes, five of 16, then four of 4.
    """
    if b.shape[1] == Quant.TQ2_0.block_bytes:
        digits = bits(b[:, :64].reshape(-1, 2, 32), 2)
    else:
        parts = ((b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4))
        found = [(part[:, None] * _POWERS[:count, None]).astype(np.uint16) * np.uint16(3) >> 8 for part, count in parts]
        digits = np.concatenate([part.reshape(len(b), -1) for part in found], axis=1).astype(np.uint8)
    return digits.view(np.int8).reshape(-1, 1, 256) - np.int8(1), f16(b, -2)


_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def _product(integers: Callable[[U8], codebooks.Integers]) -> Callable[[U8, F32], None]:
    def decode(b: U8, out: F32) -> None:
        _scaled(out, *integers(b))

    return decode


_INTEGERS: dict[Quant, Callable[[U8], codebooks.Integers]] = {
    Quant.Q3_K: _q3_k,
    Quant.TQ1_0: _ternary,
    Quant.TQ2_0: _ternary,
    Quant.MXFP4: codebooks.mxfp4,
    Quant.IQ4_NL: codebooks.iq4_nl,
    Quant.IQ4_XS: codebooks.iq4_xs,
    Quant.IQ3_S: codebooks.iq3_s,
    Quant.IQ3_XXS: codebooks.iq3_xxs,
    Quant.IQ2_S: codebooks.iq2_s,
    Quant.IQ2_XS: codebooks.iq2_xs,
    Quant.IQ2_XXS: codebooks.iq2_xxs,
    Quant.IQ1_M: codebooks.iq1_m,
    Quant.IQ1_S: codebooks.iq1_s,
    Quant.NVFP4: codebooks.nvfp4,
    Quant.Q1_0: codebooks.q1_0,
}
"""Each format whose weights are d q → a function that returns q, int8 [n, groups, weights of a group], and d, float32
[n, groups], of blocks.
"""
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
    Quant.Q4_K: _q4_k,
    Quant.Q5_K: _q4_k,
    Quant.Q6_K: _q6_k,
    **{quant: _product(integers) for quant, integers in _INTEGERS.items()},
}
