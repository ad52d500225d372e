"""The GGUF reader: values and tensors, and an error for every damage to a header."""

import contextlib
import struct

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models import gguf as reader
from foreword.models.gguf import read_gguf
from foreword.models.quants import Quant
from models import gguf_writer

RNG = np.random.default_rng(0)
METADATA = {
    "general.architecture": ("str", "llama"),
    "llama.block_count": ("u32", 2),
    "llama.rope.freq_base": ("f32", 1e5),
    "flag": ("bool", True),
    "wide": ("i64", -(2**40)),
    "tokenizer.ggml.tokens": ("[str]", ["a", "", "ü", "日本", "x" * 300]),
    "tokenizer.ggml.scores": ("[f32]", [0.5, -1.0]),
    "flags": ("[bool]", [True, False]),
}
TENSORS = {
    "norm": (Quant.F32, (5,), gguf_writer.f32(RNG.normal(size=5))),
    "matrix": (Quant.Q8_0, (3, 64), RNG.integers(0, 60, 3 * 68, dtype=np.uint8)),
    "experts": (Quant.F16, (2, 3, 4), RNG.normal(size=24).astype("<f2").view(np.uint8)),
}
DATA, ENDS = gguf_writer.assemble(METADATA, TENSORS)
HEADER_SIZE = ENDS[-len(TENSORS) - 1]


@pytest.fixture(autouse=True, params=[24, 1 << 20], ids=["in-pieces", "at-once"])
def first_read(request, monkeypatch):
    """The bytes that are read of a header before its sizes are known."""
    monkeypatch.setattr(reader, "FIRST_READ", request.param)


def read(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def read_or_model_error(tmp_path, data):
    with contextlib.suppress(ModelError):
        for tensor in read(tmp_path, data).tensors.values():
            assert tensor.dequantize().shape == tensor.shape


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["a\0b", "", "\xff", "日本", "\U0010ffff"]])
def test_the_strings_of_an_array_are_those_of_the_file(tmp_path, texts):
    found = read(tmp_path, gguf_writer.assemble({"texts": ("[str]", texts)}, {})[0]).metadata["texts"]
    assert (list(found), found.tolist(), len(found), repr(found)) == (texts, texts, len(texts), repr(texts))
    assert bool(found) == bool(texts)
    assert all(text in found for text in texts)
    assert "absent" not in found


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_everything_written_is_read(tmp_path, version, alignment):
    metadata = {**METADATA, "general.alignment": ("u32", alignment)}
    gguf = read(tmp_path, gguf_writer.assemble(metadata, TENSORS, version, alignment)[0])
    assert gguf.version == version
    assert gguf.metadata["tokenizer.ggml.tokens"].tolist() == METADATA["tokenizer.ggml.tokens"][1]
    assert gguf.metadata["flags"].tolist() == [True, False]
    assert gguf.metadata["wide"] == -(2**40)
    assert gguf.get("flag", bool) is True
    assert gguf.get("llama.rope.freq_base", float) == 1e5
    for name, (quant, shape, data) in TENSORS.items():
        tensor = gguf.tensors[name]
        assert (tensor.quant, tensor.shape) == (quant, shape)
        assert tensor.data.tobytes() == data.tobytes()
        assert tensor.dequantize().shape == shape


def test_a_missing_key_or_one_of_another_type_is_named(tmp_path):
    gguf = read(tmp_path, DATA)
    assert gguf.get("absent", int, 7) == 7
    assert gguf.get("llama.block_count", float) == 2.0
    with pytest.raises(ModelError, match=r"model\.gguf: metadata absent is missing"):
        gguf.get("absent", int)
    with pytest.raises(ModelError, match=r"general\.architecture is 'llama', not of type int"):
        gguf.get("general.architecture", int)


@pytest.mark.one_in(2)
def test_every_truncation_names_file_offset_and_field(tmp_path):
    cuts = {cut for end in ENDS for cut in (end - 1, end) if cut < len(DATA)}
    for cut in sorted(cuts | set(range(HEADER_SIZE))):
        if len(DATA) - cut <= 8:  # only padding of the last tensor is missing
            continue
        with pytest.raises(ModelError, match=r"model\.gguf: (\d+ bytes are too few|at byte \d+, .+: .+)"):
            read(tmp_path, DATA[:cut])


@pytest.mark.one_in(2)
def test_any_flipped_byte_of_the_header_is_read_or_a_model_error(tmp_path):
    for at in range(HEADER_SIZE):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(DATA)
            damaged[at] ^= flip
            read_or_model_error(tmp_path, damaged)


def test_random_damage_is_read_or_a_model_error(tmp_path):
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = np.frombuffer(DATA[: rng.integers(24, len(DATA))], np.uint8).copy()
        at = rng.integers(0, min(len(damaged), HEADER_SIZE), 4)
        damaged[at] = rng.integers(0, 256, 4)
        read_or_model_error(tmp_path, damaged.tobytes())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"PK\3\4" + bytes(40), r"at byte 0, magic: expected b'GGUF', found b'PK\\x03\\x04'.*safetensors"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version: 1 is not 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(40), "num_tensors: .* cannot fit"),
        (gguf_writer.assemble({"general.alignment": ("u32", 3)}, {})[0], "3 is not a power of two"),
        (gguf_writer.assemble({"a": ("[u8]", [1])}, {})[0].replace(b"\x09\0\0\0\0\0\0\0", b"\x09\0\0\0\x09\0\0\0"),
         "value type 9 .*arrays do not nest"),
        (gguf_writer.assemble({"k": ("str", "ab")}, {})[0].replace(b"ab", b"\xff\xfe"), "not UTF-8"),
        (gguf_writer.assemble({"k": ("[str]", ["ab"])}, {})[0].replace(b"ab", b"\xff\xfe"), "not UTF-8"),
        (gguf_writer.assemble({"kk": ("u8", 1), "kl": ("u8", 1)}, {})[0].replace(b"kl", b"kk"), "occurs twice"),
    ],
)  # fmt: skip
def test_damage_is_explained(tmp_path, data, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda info: info[:4] + struct.pack("<Q", 65) + info[12:],
            r"shape \(3, 65\) is not made of whole Q8_0 blocks",
        ),
        (lambda info: info[:-12] + struct.pack("<IQ", 36, 32), "number format 36 is not supported"),
        (lambda info: info[:-8] + struct.pack("<Q", 33), "offset 33 is not a multiple"),
        (lambda info: info[:-8] + struct.pack("<Q", 2**40), "204 bytes needed, 0 left"),
        (lambda info: struct.pack("<I", 5) + info[4:], "5 dimensions"),
    ],
)
def test_a_bad_tensor_description_names_the_tensor(tmp_path, change, message):
    info = struct.pack("<IQQIQ", 2, 64, 3, Quant.Q8_0.ggml_type, 32)
    assert DATA.count(info) == 1
    with pytest.raises(ModelError, match=f"tensor matrix: {message}"):
        read(tmp_path, DATA.replace(info, change(info)))


def test_tensors_that_overlap_are_named(tmp_path):
    info = struct.pack("<IQQIQ", 2, 64, 3, Quant.Q8_0.ggml_type, 32)
    with pytest.raises(ModelError, match=r"tensors 'matrix' and 'norm' overlap|tensors 'norm' and 'matrix' overlap"):
        read(tmp_path, DATA.replace(info, info[:-8] + struct.pack("<Q", 0)))


def test_a_missing_file_and_a_directory_are_model_errors(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path)
