"""Numbers of 8 bits, as torch.float8_e4m3fn holds them. Integer operations, which every GPU has."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def encode(x):
    """Return the uint8 nearest to float32 x, ties to even; |x| is at most LARGEST."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(x)
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # multiples of 2^-9, the last bit of 2^14
    bits = bits & 0x7FFFFFFF
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def decode(code, UNIT: tl.constexpr):
    """Return the float32 of a uint8; with UNIT by the GPU's own conversion, which gives the same numbers."""
    if UNIT:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = code.to(tl.uint32)
    size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(bits >= 0x80, -size, size)
