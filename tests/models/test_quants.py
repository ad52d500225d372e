"""Every number format against a loop over the bytes of one block."""

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from foreword.models.quants import Quant, dequantize, grid_of, ternary_as_q4
from foreword.models.weights import Tensor

f32 = np.float32
Block = bytes


def half(block: Block, at: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, at)[0])


def nibble32(block: Block, at: int, i: int) -> int:
    """Weight i of 32; the low nibbles hold the first sixteen."""
    return block[at + i % 16] >> (4 * (i // 16)) & 15


def q4_0(b: Block) -> Iterator[np.float32]:
    return (half(b, 0) * f32(nibble32(b, 2, i) - 8) for i in range(32))


def q4_1(b: Block) -> Iterator[np.float32]:
    return (half(b, 0) * f32(nibble32(b, 4, i)) + half(b, 2) for i in range(32))


def q5_0(b: Block) -> Iterator[np.float32]:
    high = int.from_bytes(b[2:6], "little")
    return (half(b, 0) * f32(nibble32(b, 6, i) + 16 * (high >> i & 1) - 16) for i in range(32))


def q5_1(b: Block) -> Iterator[np.float32]:
    high = int.from_bytes(b[4:8], "little")
    return (half(b, 0) * f32(nibble32(b, 8, i) + 16 * (high >> i & 1)) + half(b, 2) for i in range(32))


def q8_0(b: Block) -> Iterator[np.float32]:
    return (half(b, 0) * f32(q) for q in struct.unpack("<32b", b[2:]))


def scale_offset(s: Block, j: int) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def q4_k(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        s, o = scale_offset(b[4:16], i // 32)
        q = b[16 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        yield half(b, 0) * f32(s) * f32(q) - half(b, 2) * f32(o)


def q5_k(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        s, o = scale_offset(b[4:16], i // 32)
        q = b[48 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        q += 16 * (b[16 + i % 32] >> (i // 32) & 1)
        yield half(b, 0) * f32(s) * f32(q) - half(b, 2) * f32(o)


def two_bits(b: Block, at: int, i: int) -> int:
    return b[at + i // 128 * 32 + i % 32] >> (2 * (i // 32 % 4)) & 3


def q2_k(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        s = b[i // 16]
        yield half(b, 80) * f32(s & 15) * f32(two_bits(b, 16, i)) - half(b, 82) * f32(s >> 4)


def q3_k(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        j = i // 16
        scale = b[96 + j % 8] >> (4 * (j // 8)) & 15 | (b[104 + j % 4] >> (2 * (j // 4)) & 3) << 4
        q = two_bits(b, 32, i) + 4 * (b[i % 32] >> (i // 32) & 1) - 4
        yield half(b, 108) * f32(scale - 32) * f32(q)


def q6_k(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        low = b[i // 128 * 64 + i % 64] >> (4 * (i // 64 % 2)) & 15
        high = b[128 + i // 128 * 32 + i % 32] >> (2 * (i // 32 % 4)) & 3
        scale = struct.unpack_from("<b", b, 192 + i // 16)[0]
        yield half(b, 208) * f32(scale) * f32((low | high << 4) - 32)


def mxfp4(b: Block) -> Iterator[np.float32]:
    for i in range(32):
        sign, number = divmod(b[1 + i % 16] >> (4 * (i // 16)) & 15, 8)
        yield f32((-1) ** sign * [0, 0.5, 1, 1.5, 2, 3, 4, 6][number] * 2.0 ** (b[0] - 127))


def tq1_0(b: Block) -> Iterator[np.float32]:
    """Five digits of base 3 in a byte, four in the last ones: the byte is their number / 243, times 256, rounded up."""
    for first, width, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for n in range(digits):
            for byte in b[first : first + width]:
                yield half(b, 52) * f32(byte * 3**n % 256 * 3 // 256 - 1)


def tq2_0(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        yield half(b, 64) * f32((b[i // 128 * 32 + i % 32] >> (2 * (i // 32 % 4)) & 3) - 1)


LOOPS: dict[Quant, Callable[[Block], Iterator[np.float32]]] = {
    Quant.Q4_0: q4_0, Quant.Q4_1: q4_1, Quant.Q5_0: q5_0, Quant.Q5_1: q5_1, Quant.Q8_0: q8_0,
    Quant.Q2_K: q2_k, Quant.Q3_K: q3_k, Quant.Q4_K: q4_k, Quant.Q5_K: q5_k, Quant.Q6_K: q6_k,
    Quant.MXFP4: mxfp4, Quant.TQ1_0: tq1_0, Quant.TQ2_0: tq2_0,
}  # fmt: skip
HALVES = {
    Quant.Q4_0: (0,), Quant.Q4_1: (0, 2), Quant.Q5_0: (0,), Quant.Q5_1: (0, 2), Quant.Q8_0: (0,),
    Quant.Q2_K: (80, 82), Quant.Q3_K: (108,), Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,),
    Quant.TQ1_0: (52,), Quant.TQ2_0: (64,),
}  # fmt: skip


def random_rows(quant: Quant, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes, with the float16 fields made finite."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, quant.block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant, ()):
        data[..., at : at + 2] = rng.normal(0, 0.1, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    if quant is Quant.MXFP4:  # twice the largest float is not one
        data[..., 0] %= 253
    return data.reshape(rows, -1)


@pytest.mark.parametrize("quant", LOOPS, ids=lambda q: q.name)
def test_blocks_decode_as_in_the_loop(quant):
    data = random_rows(quant, rows=3, blocks=4)
    want = [list(LOOPS[quant](block.tobytes())) for block in data.reshape(-1, quant.block_bytes)]
    got = dequantize(data, quant)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(want, np.float32).reshape(3, -1))


@pytest.mark.parametrize("quant", LOOPS, ids=lambda q: q.name)
def test_weights_of_4_bits_lie_on_their_grid(quant):
    data = random_rows(quant, rows=3, blocks=4)
    grid = grid_of(data, quant)
    if quant not in (Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.TQ1_0, Quant.TQ2_0):
        assert grid is None
        return
    step, least = (field.astype(np.float64)[..., None] for field in grid)
    n = (dequantize(data, quant).reshape(3, -1, 32) - least) / np.where(step == 0, 1, step)
    np.testing.assert_allclose(n, np.rint(n), atol=1e-3)
    assert np.rint(n).min() >= 0
    assert np.rint(n).max() <= 15


@pytest.mark.parametrize("quant", [Quant.TQ1_0, Quant.TQ2_0], ids=lambda q: q.name)
def test_ternary_weights_are_equal_in_4_bits(quant):
    data = random_rows(quant, rows=3, blocks=4)
    got = dequantize(ternary_as_q4(data, quant), Quant.Q4_0)
    np.testing.assert_array_equal(got, dequantize(data, quant))


def test_every_quantised_format_is_tested():
    assert set(Quant) == set(LOOPS) | {Quant.F32, Quant.F16, Quant.BF16}


@pytest.mark.parametrize("quant", [Quant.F32, Quant.F16], ids=lambda q: q.name)
def test_float_formats_are_converted_exactly(quant):
    values = np.random.default_rng(1).normal(size=(5, 7)).astype("<f4" if quant is Quant.F32 else "<f2")
    np.testing.assert_array_equal(dequantize(values.view(np.uint8), quant), values.astype(np.float32))


def test_bf16_is_the_upper_half_of_a_float32():
    values = np.random.default_rng(2).normal(size=(3, 8)).astype("<f4")
    upper = values.view("<u2")[:, 1::2].copy()
    want = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(dequantize(upper.view(np.uint8), Quant.BF16), want)


@pytest.mark.parametrize("quant", Quant, ids=lambda q: q.name)
def test_chunks_and_leading_shapes_do_not_matter(quant):
    data = random_rows(quant, rows=2, blocks=(1 << 18) // quant.block_size + 3)
    data = np.where(np.isfinite(dequantize(data, quant)).all(), data, 0).astype(np.uint8)
    whole = dequantize(data, quant)
    tail = dequantize(data[:, -2 * quant.block_bytes :], quant)  # not contiguous
    np.testing.assert_array_equal(whole[:, -2 * quant.block_size :], tail)
    np.testing.assert_array_equal(dequantize(data.reshape(2, 1, -1), quant)[:, 0], whole)


def test_a_row_of_partial_blocks_is_refused():
    with pytest.raises(ValueError, match=r"19 bytes .* Q4_0"):
        dequantize(np.zeros((2, 19), np.uint8), Quant.Q4_0)
    with pytest.raises(ValueError, match="48 columns"):
        Quant.Q4_1.row_bytes(48)


def test_a_tensor_keeps_its_shape():
    data = random_rows(Quant.Q8_0, rows=6, blocks=2)
    assert Tensor(data, Quant.Q8_0, (2, 3, 64)).dequantize().shape == (2, 3, 64)
