"""model.safetensors.index.json: the shards of a model."""

import json

import numpy as np

from foreword.models.safetensors import read_directory
from fuzz.mutations import mutate_json
from fuzz.target import Target
from models.tiny import write_safetensors

INDEX = {"metadata": {"total_size": 8}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


def valid():
    return [json.dumps(INDEX).encode()]


def hostile():
    names = ("\0", "one\0.safetensors", "\ud800", "a" * 5000, "/etc/passwd", "..", "", "/dev/zero", "one.safetensors/x")
    return [json.dumps({"weight_map": {"a": name}}).encode() for name in names]


def read(data, folder):
    for tensor, name in (("a", "one"), ("b", "two")):
        write_safetensors(folder / f"{name}.safetensors", {tensor: np.zeros((1, 2), np.float32)})
    (folder / "model.safetensors.index.json").write_bytes(data)
    read_directory(folder)


TARGET = Target(valid, read, mutate_json, hostile)
