"""Every number format against a loop over the bytes of one block."""

import hashlib
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from foreword.executors.packed.parts import _REPACKED, source_bytes, source_of
from foreword.models.codebooks import codebook
from foreword.models.quants import Quant, dequantize, grid_of, repacked
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


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def field(b: Block, at: int, size: int, i: int, width: int) -> int:
    """Field i of ``width`` bits of an integer of ``size`` bytes."""
    return int.from_bytes(b[at : at + size], "little") >> (width * i) & ((1 << width) - 1)


def sign(bits: int, i: int) -> int:
    return -1 if bits >> i & 1 else 1


def sign_of_7(bits: int, i: int) -> int:
    """The eighth bit makes the number of bits even."""
    return sign(bits | bits.bit_count() % 2 << 7, i)


def iq4_nl(b: Block) -> Iterator[np.float32]:
    return (half(b, 0) * f32(IQ4[nibble32(b, 2, i)]) for i in range(32))


def iq4_xs(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        j = i // 32
        scale = field(b, 4, 4, j, 4) | field(b, 2, 2, j, 2) << 4
        yield half(b, 0) * f32(scale - 32) * f32(IQ4[nibble32(b, 8 + 16 * j, i % 32)])


def iq3_s(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        entry = b[2 + i // 4] | field(b, 66, 8, i // 4, 1) << 8
        weight = int(codebook("IQ3_S")[entry, i % 4]) * sign(b[74 + i // 8], i % 8)
        yield half(b, 0) * f32(2 * field(b, 106, 4, i // 32, 4) + 1) * f32(weight)


def iq3_xxs(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        word = int.from_bytes(b[66 + i // 32 * 4 :][:4], "little")
        weight = int(codebook("IQ3_XXS")[b[2 + i // 4], i % 4]) * sign_of_7(word >> 7 * (i // 8 % 4) & 127, i % 8)
        yield half(b, 0) * f32((word >> 28) + 0.5) * f32(0.5 * weight)


def iq2_s(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        entry = b[2 + i // 8] | field(b, 66, 8, i // 8, 2) << 8
        weight = int(codebook("IQ2_S")[entry, i % 8]) * sign(b[34 + i // 8], i % 8)
        yield half(b, 0) * f32(field(b, 74, 8, i // 16, 4) + 0.5) * f32(0.25 * weight)


def iq2_xs(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        word = field(b, 2, 64, i // 8, 16)
        weight = int(codebook("IQ2_XS")[word & 511, i % 8]) * sign_of_7(word >> 9, i % 8)
        yield half(b, 0) * f32(field(b, 66, 8, i // 16, 4) + 0.5) * f32(0.25 * weight)


def iq2_xxs(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        entries, word = struct.unpack_from("<4sI", b, 2 + i // 32 * 8)
        part = i // 8 % 4
        weight = int(codebook("IQ2_XXS")[entries[part], i % 8]) * sign_of_7(word >> 7 * part & 127, i % 8)
        yield half(b, 0) * f32((word >> 28) + 0.5) * f32(0.25 * weight)


def iq1_m(b: Block) -> Iterator[np.float32]:
    bits = sum(b[49 + 2 * j] >> 4 << 4 * j for j in range(4))
    for i in range(256):
        high = field(b, 32, 16, i // 8, 4)
        weight = codebook("IQ1_S")[b[i // 8] | (high & 7) << 8, i % 8] + (-0.125 if high & 8 else 0.125)
        scale = field(b, 48 + 2 * (i // 64), 2, i // 16 % 4, 3)
        yield half(struct.pack("<H", bits), 0) * f32(2 * scale + 1) * f32(weight)


def iq1_s(b: Block) -> Iterator[np.float32]:
    for i in range(256):
        word = field(b, 34, 16, i // 32, 16)
        entry = b[2 + i // 8] | (word >> 3 * (i // 8 % 4) & 7) << 8
        weight = codebook("IQ1_S")[entry, i % 8] + (-0.125 if word >> 15 else 0.125)
        yield half(b, 0) * f32(2 * (word >> 12 & 7) + 1) * f32(weight)


def nvfp4(b: Block) -> Iterator[np.float32]:
    for i in range(64):
        exponent, fraction = divmod(b[i // 16] % 128, 8)
        scale = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction * 2.0**-9
        nibble = b[4 + i // 16 * 8 + i % 8] >> (4 * (i // 8 % 2)) & 15
        yield f32((0 if b[i // 16] == 127 else scale) * E2M1[nibble])


def q1_0(b: Block) -> Iterator[np.float32]:
    return (half(b, 0) * f32(1 if b[2 + i // 8] >> i % 8 & 1 else -1) for i in range(128))


LOOPS: dict[Quant, Callable[[Block], Iterator[np.float32]]] = {
    Quant.Q4_0: q4_0, Quant.Q4_1: q4_1, Quant.Q5_0: q5_0, Quant.Q5_1: q5_1, Quant.Q8_0: q8_0,
    Quant.Q2_K: q2_k, Quant.Q3_K: q3_k, Quant.Q4_K: q4_k, Quant.Q5_K: q5_k, Quant.Q6_K: q6_k,
    Quant.MXFP4: mxfp4, Quant.TQ1_0: tq1_0, Quant.TQ2_0: tq2_0, Quant.NVFP4: nvfp4, Quant.Q1_0: q1_0,
    Quant.IQ4_NL: iq4_nl, Quant.IQ4_XS: iq4_xs, Quant.IQ3_S: iq3_s, Quant.IQ3_XXS: iq3_xxs, Quant.IQ2_S: iq2_s,
    Quant.IQ2_XS: iq2_xs, Quant.IQ2_XXS: iq2_xxs, Quant.IQ1_M: iq1_m, Quant.IQ1_S: iq1_s,
}  # fmt: skip
HALVES = {
    Quant.Q4_0: (0,), Quant.Q4_1: (0, 2), Quant.Q5_0: (0,), Quant.Q5_1: (0, 2), Quant.Q8_0: (0,),
    Quant.Q2_K: (80, 82), Quant.Q3_K: (108,), Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,),
    Quant.TQ1_0: (52,), Quant.TQ2_0: (64,), Quant.Q1_0: (0,), Quant.IQ4_NL: (0,), Quant.IQ4_XS: (0,), Quant.IQ3_S: (0,),
    Quant.IQ3_XXS: (0,), Quant.IQ2_S: (0,), Quant.IQ2_XS: (0,), Quant.IQ2_XXS: (0,), Quant.IQ1_S: (0,),
}  # fmt: skip


def random_rows(quant: Quant, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes, with the float16 fields made finite."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, quant.block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant, ()):
        data[..., at : at + 2] = rng.normal(0, 0.1, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    if quant is Quant.MXFP4:  # twice the largest float is not one
        data[..., 0] %= 253
    if quant is Quant.IQ1_M:  # the upper bits of d
        data[..., 55] &= 0xB7
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
    if quant not in (Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.TQ1_0, Quant.TQ2_0, Quant.Q1_0):
        assert grid is None
        return
    step, least = (field.astype(np.float64)[..., None] for field in grid)
    n = (dequantize(data, quant).reshape(3, -1, 32) - least) / np.where(step == 0, 1, step)
    np.testing.assert_allclose(n, np.rint(n), atol=1e-3)
    assert np.rint(n).min() >= 0
    assert np.rint(n).max() <= 15


# sha256 of the weights, as float32, that the package gguf 0.19.0 computes of `bytes_of`
RECORDED = {
    "IQ4_NL": "1c1cf7e53f18d9aa6bd9d604e2566ab960f9a83f6ecfcf5ea4dd5d5a1b1facc1",
    "IQ4_XS": "54983723ce1f95417cbf7499d0bb9e3dcc9ed4d963f9409591090301592ea66a",
    "IQ3_S": "98805dbad2164818d6372916645d86de8e5e261741f836f4adf6a044c1e6d907",
    "IQ3_XXS": "51a19ea36bcfaf2ba4dec6b6e19ae50497ab82a61ba496abd7850d49fcbe0abf",
    "IQ2_S": "32c6c4fe2fdeb1769644e292727572753e4b3fa35edc858e5d1731ef1d89f455",
    "IQ2_XS": "66d75781ca37badece15207dd08cf233951a07e0f319136a96d8d0846d6d1b33",
    "IQ2_XXS": "8b42dc71d6bd2bc6be00a15a056b11306099b0f920dac20b5dd0334f6797a32b",
    "IQ1_M": "62a2a25ef260bb16d44fc4889a8ab3d9e18b899da6af164805937521e5aee858",
    "IQ1_S": "c5046e4be09f1de9c943474550ecad1ec2391596c69a925a3da25205a9e838af",
    "NVFP4": "d0b73453d571c2ea56e6fd33002f44152026012884af27ea232d1bb09d552934",
}


def bytes_of(quant: Quant, rows: int, blocks: int) -> np.ndarray:
    """Bytes that do not depend on NumPy, with the float16 fields made finite."""
    size = rows * blocks * quant.block_bytes
    data = np.frombuffer(hashlib.shake_256(quant.name.encode()).digest(size), np.uint8).reshape(-1, quant.block_bytes)
    data = data.copy()
    for at in HALVES.get(quant, ()):
        data[:, at + 1] &= 0xB7
    if quant is Quant.IQ1_M:
        data[:, 55] &= 0xB7
    return data.reshape(rows, -1)


@pytest.mark.parametrize("quant", [quant for quant in Quant if quant.name in RECORDED], ids=lambda q: q.name)
def test_formats_of_tables_are_those_of_gguf(quant):
    weights = dequantize(bytes_of(quant, 4, 64), quant)
    assert hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest() == RECORDED[quant.name]


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"])
def test_the_entries_of_a_codebook_differ(name):
    entries = codebook(name)
    assert len({entry.tobytes() for entry in entries}) == len(entries)


@pytest.mark.parametrize(("quant", "form"), _REPACKED.items(), ids=str)
def test_weights_that_are_packed_in_another_format_are_equal(quant, form):
    data = random_rows(quant, rows=3, blocks=4)
    got, want = repacked(data, quant, form), dequantize(data, quant)
    if form == "Q4_0":
        read = dequantize(got, Quant.Q4_0)
    else:
        blocks = got.reshape(-1, 4 + int(form.removeprefix("INT8_")))
        read = blocks[:, 4:].view(np.int8) * blocks[:, :4].copy().view("<f4")
    np.testing.assert_array_equal(read.reshape(want.shape), want)


@pytest.mark.parametrize("quant", Quant, ids=lambda q: q.name)
def test_the_bytes_that_native_code_gets_are_known(quant):
    tensor = Tensor(random_rows(quant, rows=3, blocks=256 // min(quant.block_size, 256)), quant, (3, 256))
    assert source_bytes(tensor) == source_of(tensor)[0].nbytes


def test_every_quantised_format_is_tested():
    assert set(Quant) == set(LOOPS) | {Quant.F32, Quant.F16, Quant.BF16}


def test_the_page_of_models_names_every_format():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [quant.name for quant in Quant if not re.search(rf"\b{quant.name}\b", text)] == []


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
