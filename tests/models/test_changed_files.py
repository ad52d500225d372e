"""Model files that change while they are in use: an error while they are read, and no effect after that."""

import json
import os

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.gguf import read_gguf
from foreword.models.quants import Quant
from foreword.models.safetensors import read_safetensors
from models import gguf_writer

VALUES = np.arange(3 * 4096, dtype=np.float32).reshape(3, 4096)


def gguf(path):
    path.write_bytes(gguf_writer.assemble({}, {"w": (Quant.F32, VALUES.shape, VALUES.view(np.uint8))})[0])
    return lambda: read_gguf(path).tensors["w"]


def safetensors(path):
    entry = {"w": {"dtype": "F32", "shape": VALUES.shape, "data_offsets": [0, VALUES.nbytes]}}
    header = json.dumps(entry).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + VALUES.tobytes())
    return lambda: dict(read_safetensors(path))["w"]


def truncate(path):
    os.truncate(path, 200)


def overwrite(path):
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (1, 1))


@pytest.fixture(params=[gguf, safetensors])
def file(request, tmp_path):
    path = tmp_path / "model"
    return path, request.param(path)


@pytest.mark.parametrize("change", [truncate, overwrite])
def test_a_file_that_is_truncated_or_overwritten_is_an_error(file, change):
    path, read = file
    tensor = read()
    np.testing.assert_array_equal(tensor.dequantize(), VALUES)
    change(path)
    with pytest.raises(ModelError, match=f"{path}: was changed"):
        tensor.dequantize()


def test_a_file_that_is_replaced_or_removed_is_read_as_it_was(file):
    path, read = file
    tensor = read()
    path.with_name("other").write_bytes(b"other")
    os.replace(path.with_name("other"), path)
    np.testing.assert_array_equal(tensor.dequantize(), VALUES)
    path.unlink()
    np.testing.assert_array_equal(tensor.stored[1:2].read().view(np.float32), VALUES[1:2])


def test_open_files_are_closed_with_their_last_tensor(file):
    _, read = file
    before = len(os.listdir("/dev/fd"))
    tensor = read()
    assert len(os.listdir("/dev/fd")) == before + 1
    del tensor
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.long
def test_a_header_of_many_megabytes_is_read(tmp_path):
    texts = [f"{i:060}" for i in range(300_000)]
    metadata = {"long": ("[str]", texts), "numbers": ("[f32]", list(range(1000))), "last": ("str", "x")}
    path = tmp_path / "long.gguf"
    path.write_bytes(gguf_writer.assemble(metadata, {"w": (Quant.F32, (2, 32), np.zeros(256, np.uint8))})[0])
    found = read_gguf(path)
    assert found.metadata["long"].tolist() == texts
    assert found.metadata["last"] == "x"
    path.write_bytes(path.read_bytes()[: 18 << 20])
    with pytest.raises(ModelError, match=r"string 2.* of 300000 goes past the end of the file"):
        read_gguf(path)
