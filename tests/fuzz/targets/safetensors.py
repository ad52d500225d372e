"""safetensors: the header as JSON in front of the data."""

import json
import struct
from pathlib import Path
from random import Random

from foreword.models.safetensors import read_directory
from fuzz.mutations import DEEP, mutate_bytes, mutate_json
from fuzz.target import Target

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F16", "shape": [1, 2, 2], "data_offsets": [32, 40]},
}


def file(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(40)


def valid() -> list[bytes]:
    return [file(json.dumps(HEADER).encode())]


def hostile() -> list[bytes]:
    def entry(**changes: object) -> bytes:
        return file(json.dumps({"a": {**HEADER["a"], **changes}}).encode())

    infinite = json.dumps({"a": {**HEADER["a"], "shape": [float("inf")]}}).encode()
    twice = json.dumps({**HEADER, "d": HEADER["a"]}).encode()
    return [entry(dtype={}), entry(dtype=[]), entry(shape=[1e400]), file(infinite), file(twice), file(b"[" * DEEP)]


def mutate(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    return file(mutate_json(rng, data[8:-40]))


def read(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    for entry in read_directory(folder).values():
        tensor = entry.tensor()
        assert tensor.dequantize().shape == tensor.shape


TARGET = Target(valid, read, mutate, hostile)
