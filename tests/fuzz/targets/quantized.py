"""Quantised checkpoints: the quantization_config and the header of the tensors, as one JSON object."""

import json
import struct

from foreword.models.config import read_config
from foreword.models.quantized import conversions, read_weights
from foreword.models.safetensors import read_directory
from fuzz.mutations import mutate_json
from fuzz.target import Target

DATA = bytes(range(64)) * 18  # small scales, and no NaN


def tensors(**entries):
    """The header of tensors {name: (dtype, shape, bytes)} one after the other."""
    header, offset = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[f"w.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return header


SCALES = ("F16", [2, 8], 32)
AWQ = tensors(qweight=("I32", [64, 1], 256), qzeros=("I32", [2, 1], 8), scales=SCALES)
GPTQ = tensors(qweight=("I32", [8, 8], 256), qzeros=("I32", [2, 1], 8), scales=SCALES)
FP8 = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale=("F32", [8, 1], 32))
BLOCKS = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale_inv=("BF16", [2, 3], 12))
INTEGERS = {"bits": 4, "group_size": 32}


def encoded(header, **quantization):
    return json.dumps({"quantization_config": quantization, "header": header}).encode()


def valid():
    return [
        encoded(AWQ, quant_method="awq", version="gemm", zero_point=True, **INTEGERS),
        encoded(GPTQ, quant_method="gptq", checkpoint_format="gptq", desc_act=False, **INTEGERS),
        encoded(FP8, quant_method="compressed-tensors", format="float-quantized"),
        encoded(BLOCKS, quant_method="fp8", weight_block_size=[4, 24]),
    ]


def hostile():
    return [
        encoded(BLOCKS, quant_method="fp8", weight_block_size=[4, 1 << 28]),
        encoded(FP8, quant_method="fp8", weight_block_size=[1 << 60, 1 << 60]),
        encoded(GPTQ, quant_method="gptq", bits=4, group_size=1 << 27),
    ]


def read(data, folder):
    (folder / "config.json").write_bytes(data)
    config = read_config(folder / "config.json")
    header = json.dumps(config.values.get("header", {})).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + DATA)
    weights = read_weights(read_directory(folder), config)
    conversions(weights.values())
    for tensor in weights.values():
        assert tensor.dequantize().shape == tensor.shape


TARGET = Target(valid, read, mutate_json, hostile)
