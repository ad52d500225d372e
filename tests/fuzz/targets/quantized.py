"""Quantised checkpoints: the quantization_config, the header of the tensors, and the settings in the tensors, as one
JSON object.
"""

import json
import struct

from foreword.models.config import read_config
from foreword.models.quantized import conversions, read_weights
from foreword.models.safetensors import read_directory
from fuzz.mutations import mutate_json
from fuzz.target import Target

DATA = bytes(range(64)) * 24  # small scales, and no NaN
SHAPE, FACTOR = struct.pack("<2q", 8, 64), struct.pack("<f", 0.5)
SHAPE_AT, FACTOR_AT, STATE_AT, STATE_SIZE = len(DATA), len(DATA) + 16, len(DATA) + 20, 256
"""Behind the data: a shape, a factor, and the state of a matrix by bitsandbytes as JSON."""
NUMBERS, NUMBERS_AT = struct.pack("<3i", 4, 32, 1), STATE_AT + STATE_SIZE
"""Behind these: the bits, the size of groups and the axis of a matrix by HQQ."""
STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [8, 64], "dtype": "float32", "nested_blocksize": 4,
         "nested_offset": 0.5}  # fmt: skip


def tensors(**entries):
    """The header of tensors {name: (dtype, shape, bytes)} one after the other, unless they say where they begin."""
    header, offset = {}, 0
    for name, (dtype, shape, size, *at) in entries.items():
        start = at[0] if at else offset
        header[f"w.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        offset += 0 if at else size
    return header


SCALES = ("F16", [2, 8], 32)
AWQ = tensors(qweight=("I32", [64, 1], 256), qzeros=("I32", [2, 1], 8), scales=SCALES)
GPTQ = tensors(qweight=("I32", [8, 8], 256), qzeros=("I32", [2, 1], 8), scales=SCALES)
FP8 = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale=("F32", [8, 1], 32))
BLOCKS = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale_inv=("BF16", [2, 3], 12))
BLOCKS_OF_8 = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale=("BF16", [2, 3], 12))
INTEGERS = {"bits": 4, "group_size": 32}
WORDS = tensors(
    weight_packed=("I32", [8, 8], 256),
    weight_scale=("F16", [8, 2], 32),
    weight_zero_point=("I32", [1, 2], 8),
    weight_shape=("I64", [2], 16, SHAPE_AT),
)
INT8 = tensors(weight=("I8", [8, 64], 512), weight_scale=("F32", [8, 1], 32))
NVFP4 = tensors(
    weight_packed=("U8", [8, 32], 256),
    weight_scale=("F8_E4M3", [8, 4], 32),
    weight_global_scale=("F32", [1], 4, FACTOR_AT),
)
MXFP4 = tensors(weight_packed=("U8", [8, 32], 256), weight_scale=("U8", [8, 2], 16))
MODELOPT = tensors(
    weight=("U8", [8, 32], 256), weight_scale=("F8_E4M3", [8, 4], 32), weight_scale_2=("F32", [1], 4, FACTOR_AT)
)
NF4 = tensors(
    **{
        "weight": ("U8", [256, 1], 256),
        "weight.absmax": ("U8", [8], 8),
        "weight.quant_map": ("F32", [16], 64),
        "weight.nested_absmax": ("F32", [2], 8),
        "weight.nested_quant_map": ("F32", [256], 1024),
        "weight.quant_state.bitsandbytes__nf4": ("U8", [STATE_SIZE], STATE_SIZE, STATE_AT),
    }
)
INT8_ROWS = tensors(weight=("I8", [8, 64], 512), SCB=("F32", [8], 32))
HQQ = tensors(
    W_q=("U8", [8, 32], 256),
    scale=("F16", [16, 1], 32),
    zero=("F16", [16, 1], 32),
    shape=("I64", [2], 16, SHAPE_AT),
    **{name: ("I32", [], 4, NUMBERS_AT + 4 * i) for i, name in enumerate(("nbits", "group_size", "axis"))},
)
MXFP8 = tensors(weight=("F8_E4M3", [8, 64], 512), weight_scale_inv=("U8", [8, 2], 16))
AFFINE = tensors(weight=("U32", [8, 8], 256), scales=("F16", [8, 2], 32), biases=("F16", [8, 2], 32))
GLOBAL = tensors(weight=("U32", [1, 8, 8], 256), scales=("U8", [1, 8, 4], 32), global_scale=("F32", [1], 4, FACTOR_AT))


def encoded(header, state=STATE, **quantization):
    return json.dumps({"quantization_config": quantization, "header": header, "state": state}).encode()


def compressed(header, form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return encoded(header, quant_method="compressed-tensors", format=form, config_groups=groups)


def valid():
    return [
        encoded(AWQ, quant_method="awq", version="gemm", zero_point=True, **INTEGERS),
        encoded(GPTQ, quant_method="gptq", checkpoint_format="gptq", desc_act=False, **INTEGERS),
        encoded(FP8, quant_method="compressed-tensors", format="float-quantized"),
        encoded(BLOCKS, quant_method="fp8", weight_block_size=[4, 24]),
        encoded(GPTQ, quant_method="auto-round", packing_format="auto_round:auto_gptq", sym=True, **INTEGERS),
        compressed(WORDS, "pack-quantized", num_bits=4, type="int", symmetric=False, group_size=32),
        compressed(INT8, "int-quantized", num_bits=8, type="int", strategy="channel"),
        compressed(NVFP4, "nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        compressed(MXFP4, "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        compressed(BLOCKS_OF_8, "naive-quantized", num_bits=8, type="float", block_structure=[4, 24]),
        encoded(MODELOPT, quant_method="modelopt", quant_algo="NVFP4"),
        encoded(NF4, quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True),
        encoded(INT8_ROWS, quant_method="bitsandbytes", load_in_8bit=True),
        encoded(HQQ, quant_method="hqq", skip_modules=["lm_head"], quant_config={"weight_quant_params": {"axis": 1}}),
        encoded(MXFP8, quant_method="mxfp8", weight_block_size=[1, 32]),
        encoded(AFFINE, quant_method="mlx", w={"bits": 4, "group_size": 32, "mode": "affine"}, **INTEGERS),
        encoded(GLOBAL, quant_method="mlx", bits=4, group_size=16, mode="nvfp4"),
    ]  # fmt: skip


def hostile():
    return [
        encoded(BLOCKS, quant_method="fp8", weight_block_size=[4, 1 << 28]),
        encoded(FP8, quant_method="fp8", weight_block_size=[1 << 60, 1 << 60]),
        encoded(GPTQ, quant_method="gptq", bits=4, group_size=1 << 27),
        compressed(WORDS, "pack-quantized", num_bits=4, type="int", symmetric=False, group_size=1 << 60),
        encoded(NF4, {**STATE, "shape": [1 << 60, 1 << 60]}, quant_method="bitsandbytes", load_in_4bit=True,
                bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ]  # fmt: skip


def read(data, folder):
    (folder / "config.json").write_bytes(data)
    config = read_config(folder / "config.json")
    header = json.dumps(config.values.get("header", {})).encode()
    state = json.dumps(config.values.get("state", {})).encode().ljust(STATE_SIZE)
    data = DATA + SHAPE + FACTOR + state + NUMBERS
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    weights = read_weights(read_directory(folder), config)
    conversions(weights.values())
    for tensor in weights.values():
        assert tensor.dequantize().shape == tensor.shape


TARGET = Target(valid, read, mutate_json, hostile)
