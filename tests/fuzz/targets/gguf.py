"""GGUF files: the header, and tensors of every number format, read as float32."""

import numpy as np

from foreword.models.gguf import read_gguf
from foreword.models.quants import Quant
from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from models import gguf_writer

METADATA = {
    "general.architecture": ("str", "llama"),
    "general.alignment": ("u32", 32),
    **{kind: (kind, 1) for kind in gguf_writer.KINDS},
    **{f"[{kind}]": (f"[{kind}]", [0, 1]) for kind in gguf_writer.KINDS},
    "tokens": ("[str]", ["a", "", "ü", "x" * 100]),
}


def file(quants):
    rng = np.random.default_rng(0)
    tensors = {
        f"{quant.name}-{shape}": (quant, shape, rng.integers(0, 256, rows * quant.row_bytes(shape[-1]), np.uint8))
        for quant in quants
        for shape, rows in (((256,), 1), ((3, 512), 3), ((2, 2, 256), 4))
    }
    return gguf_writer.assemble(METADATA, tensors)[0]


def valid():
    return [file([quant]) for quant in Quant] + [file(Quant)]


def mutate(rng, data):
    return mutate_bytes(rng, data, within=rng.choice((None, 24, 1000)))


def read(data, folder):
    path = folder / "model.gguf"
    path.write_bytes(data)
    for tensor in read_gguf(path).tensors.values():
        assert tensor.dequantize().shape == tensor.shape


TARGET = Target(valid, read, mutate)
