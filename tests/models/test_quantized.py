"""Quantised checkpoints: converted within a bound, as loops over the definition of each format have it."""

import json
import math
import re
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import read_config
from foreword.models.loader import load_model
from foreword.models.quantized import conversions, read_weights
from foreword.models.quants import Quant
from foreword.models.safetensors import read_directory
from models import quantized_checkpoints as stored
from models.lora_files import is_turned
from models.quantized_checkpoints import draw_awq, draw_fp8, draw_gptq, draw_int8, draw_packed
from models.recorded import TINY
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model, write_safetensors

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "act_bits": 16, "iters": 200}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6.0}
NESTED = {**BNB, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
OF_HQQ = {"nbits": 4, "group_size": 32, "axis": 1, "optimize": True, "round_zero": True, "view_as_float": False}
HQQ_MADE = json.loads((Path(__file__).parents[1] / "data" / "models" / "hqq.json").read_text())["matrices"]
PLAIN_SCALES = {"scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
HQQ = {"quant_method": "hqq", "skip_modules": [], "quant_config": {"weight_quant_params": OF_HQQ, **PLAIN_SCALES}}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def compressed(form, *groups, **own):
    """groups: what each says of its weights."""
    listed = {f"group_{i}": {"targets": ["Linear"], "weights": weights} for i, weights in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": listed, "ignore": ["lm_head"], **own}


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
W4_UNEVEN = {**W4, "symmetric": False}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
W8_UNEVEN = {**W8, "symmetric": False}
WFP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
PACKED, INT, NVFP4 = "pack-quantized", "int-quantized", "nvfp4-pack-quantized"


def rng():
    return np.random.default_rng(0)


def read(folder, quantization, parts, prefix="w."):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    write_safetensors(folder / "model.safetensors", {prefix + name: array for name, array in parts.items()})
    return read_weights(read_directory(folder), read_config(folder / "config.json"))


def blocks_max(want):
    """The largest magnitude of the 32 weights around each."""
    return np.repeat(np.abs(want).reshape(len(want), -1, 32).max(-1), 32, axis=1)


MIXED = np.random.default_rng(1).permutation(np.arange(96) // 32)

FOUR_BIT = {
    "AWQ": (AWQ, lambda: draw_awq(rng(), 24, 96, 32), lambda p: stored.awq(p, 32)),
    "AWQ, groups of 128, the last one shorter": (
        {**AWQ, "group_size": 128},
        lambda: draw_awq(rng(), 8, 160, 128),
        lambda p: stored.awq(p, 128),
    ),
    "AWQ, more rows than are converted at once": (
        AWQ,
        lambda: draw_awq(rng(), 1032, 160, 32),
        lambda p: stored.awq(p, 32),
    ),
    "AWQ, one group": ({**AWQ, "group_size": -1}, lambda: draw_awq(rng(), 8, 96, 96), lambda p: stored.awq(p, 96)),
    "GPTQ": (GPTQ, lambda: draw_gptq(rng(), 24, 96, 32), lambda p: stored.gptq(p, 32)),
    "GPTQ, rows that do not fill the words of zero points": (
        GPTQ,
        lambda: draw_gptq(rng(), 13, 96, 32),
        lambda p: stored.gptq(p, 32),
    ),
    "GPTQ, version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda: draw_gptq(rng(), 16, 96, 32),
        lambda p: stored.gptq(p, 32, version=2),
    ),
    "GPTQ, version 2 under the other key": (
        {**GPTQ, "format": "gptq_v2"},
        lambda: draw_gptq(rng(), 16, 96, 32),
        lambda p: stored.gptq(p, 32, version=2),
    ),
    "AutoRound by GPTQ": (AUTOROUND, lambda: draw_gptq(rng(), 24, 96, 32), lambda p: stored.gptq(p, 32)),
    "AutoRound by AWQ": (
        {**AUTOROUND, "packing_format": "auto_round:auto_awq"},
        lambda: draw_awq(rng(), 24, 96, 32),
        lambda p: stored.awq(p, 32),
    ),
    "compressed-tensors, words": (
        {**compressed(PACKED, W4_UNEVEN), "group_size": 32},
        lambda: draw_packed(rng(), 24, 96, 32, symmetric=False),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "compressed-tensors, rows that do not fill the words of zero points": (
        {**compressed(PACKED, W4_UNEVEN), "group_size": 32},
        lambda: draw_packed(rng(), 13, 96, 32, symmetric=False),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "HQQ": (HQQ, lambda: stored.draw_hqq(rng(), 24, 96, 4, 32, 1), stored.hqq),
    "HQQ, more rows than are converted at once": (HQQ, lambda: stored.draw_hqq(rng(), 1032, 160, 4, 32, 1), stored.hqq),
    "HQQ, 2 bit, groups of 96, stored as floats": (
        {**HQQ, "quant_config": {"self_attn.q_proj": HQQ["quant_config"], "mlp.up_proj": None}},
        lambda: stored.draw_hqq(rng(), 24, 96, 2, 96, 1, "<f2"),
        stored.hqq,
    ),
    "HQQ, 1 bit": (HQQ, lambda: stored.draw_hqq(rng(), 24, 96, 1, 32, 1), stored.hqq),
    "GPTQ, groups in order": (
        GPTQ,
        lambda: draw_gptq(rng(), 16, 96, 32, g_idx=np.arange(96) // 32),
        lambda p: stored.gptq(p, 32),
    ),
}


@pytest.mark.parametrize("name", FOUR_BIT)
def test_four_bits_change_by_a_64th_of_their_scale(tmp_path, name):
    quantization, draw, loop = FOUR_BIT[name]
    parts = draw()
    tensor = read(tmp_path, quantization, parts)["w.weight"]
    want = loop(parts)
    assert tensor.quant is Quant.Q4_1
    assert tensor.shape == want.shape
    size = int(parts["group_size"] if "group_size" in parts else quantization["group_size"])
    group = size if size > 0 else want.shape[1]
    own = parts["scales"].T if "scales" in parts else parts.get("weight_scale", parts.get("scale"))
    own = own.reshape(len(want), -1)
    steps = np.repeat(own.astype(float), group, axis=1)[:, : want.shape[1]]
    assert (np.abs(tensor.dequantize() - want) <= steps / 64).all()


EXACT = {
    "GPTQ, 4 bit": (Quant.Q4_0, GPTQ, draw_gptq(rng(), 16, 96, 32, zero=7), lambda p: stored.gptq(p, 32)),
    "GPTQ, 8 bit": (
        Quant.Q8_0,
        {**GPTQ, "bits": 8},
        draw_gptq(rng(), 16, 96, 32, bits=8, zero=127),
        lambda p: stored.gptq(p, 32, bits=8),
    ),
    "compressed-tensors, 4 bit": (
        Quant.Q4_0,
        compressed(PACKED, W4, {"num_bits": 8, "type": "int"}),
        draw_packed(rng(), 13, 96, 32),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "compressed-tensors, 4 bit, sorted columns of one group": (
        Quant.Q4_0,
        compressed(PACKED, {**W4, "actorder": "group"}),
        draw_packed(rng(), 16, 96, 32, g_idx=np.repeat([2, 0, 1], 32)),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "compressed-tensors, 8 bit words": (
        Quant.Q8_0,
        compressed(PACKED, {**W4, "num_bits": 8}),
        draw_packed(rng(), 16, 96, 32, 8),
        lambda p: stored.compressed_integers(p, 32, 8),
    ),
    "compressed-tensors, int8, a scale per row": (
        Quant.Q8_0,
        compressed(INT, W8),
        draw_int8(rng(), 1032, 160),
        lambda p: stored.compressed_integers(p, 0),
    ),
    "compressed-tensors, int8, one scale": (
        Quant.Q8_0,
        compressed("naive-quantized", {**W8, "strategy": "tensor"}),
        draw_int8(rng(), 16, 96, (1,)),
        lambda p: stored.compressed_integers(p, 0),
    ),
    "compressed-tensors, int8, groups": (
        Quant.Q8_0,
        compressed(INT, {**W4, "num_bits": 8}),
        draw_int8(rng(), 16, 96, (16, 3)),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "compressed-tensors, MXFP4": (
        Quant.MXFP4,
        compressed(
            "mxfp4-pack-quantized", {**FP4, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
        ),
        stored.draw_mxfp4(rng(), 16, 96),
        stored.mxfp4,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_symmetric_integers_and_mxfp4_are_exact(tmp_path, name):
    quant, quantization, parts, loop = EXACT[name]
    tensor = read(tmp_path, quantization, parts)["w.weight"]
    assert tensor.quant is quant
    np.testing.assert_array_equal(tensor.dequantize(), loop(parts))


EIGHT_BIT = {
    "GPTQ, 4 bit, mixed groups": (
        GPTQ,
        lambda: draw_gptq(rng(), 16, 96, 32, g_idx=MIXED),
        lambda p: stored.gptq(p, 32),
    ),
    "GPTQ, 4 bit, groups of 16": (
        {**GPTQ, "group_size": 16},
        lambda: draw_gptq(rng(), 16, 96, 16),
        lambda p: stored.gptq(p, 16),
    ),
    "GPTQ, 8 bit": ({**GPTQ, "bits": 8}, lambda: draw_gptq(rng(), 16, 96, 32, 8), lambda p: stored.gptq(p, 32, 8)),
    "GPTQ, 8 bit, mixed groups": (
        {**GPTQ, "bits": 8},
        lambda: draw_gptq(rng(), 16, 96, 32, 8, g_idx=MIXED),
        lambda p: stored.gptq(p, 32, 8),
    ),
    "compressed-tensors, words, mixed groups": (
        compressed(PACKED, {**W4, "actorder": "group"}),
        lambda: draw_packed(rng(), 16, 96, 32, g_idx=MIXED),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "compressed-tensors, 8 bit words, groups of 16": (
        compressed(PACKED, {**W8_UNEVEN, "strategy": "group", "group_size": 16}),
        lambda: draw_packed(rng(), 13, 96, 16, 8, symmetric=False),
        lambda p: stored.compressed_integers(p, 16, 8),
    ),
    "compressed-tensors, int8": (
        compressed(INT, W8_UNEVEN),
        lambda: draw_int8(rng(), 16, 96, symmetric=False),
        lambda p: stored.compressed_integers(p, 0),
    ),
    "compressed-tensors, FP8 in blocks": (
        compressed("float-quantized", {**WFP8, "strategy": "block", "block_structure": [16, 40]}),
        lambda: draw_fp8(rng(), 24, 96, (16, 40)),
        lambda p: stored.fp8(p, (16, 40)),
    ),
    "compressed-tensors, FP8 in groups": (
        compressed("float-quantized", {**WFP8, "strategy": "group", "group_size": 32}),
        lambda: draw_fp8(rng(), 24, 96, (1, 32)),
        lambda p: stored.fp8(p, (1, 32)),
    ),
    "compressed-tensors, NVFP4, more rows than are converted at once": (
        compressed(NVFP4, FP4),
        lambda: stored.draw_nvfp4(rng(), 1032, 160),
        stored.nvfp4,
    ),
    "modelopt, NVFP4": (MODELOPT, lambda: stored.draw_modelopt(rng(), 24, 96), stored.nvfp4),
    "modelopt, FP8": (
        {**MODELOPT, "quant_algo": "FP8"},
        lambda: draw_fp8(rng(), 24, 96, (24, 96)),
        lambda p: stored.fp8(p, (24, 96)),
    ),
    "bitsandbytes, nf4": (BNB, lambda: stored.draw_bitsandbytes(rng(), 24, 96), stored.bitsandbytes),
    "bitsandbytes, fp4, more rows than are converted at once": (
        {**BNB, "bnb_4bit_quant_type": "fp4"},
        lambda: stored.draw_bitsandbytes(rng(), 1032, 160, "fp4", block=128),
        stored.bitsandbytes,
    ),
    "bitsandbytes, nested": (NESTED, lambda: stored.draw_bitsandbytes(rng(), 24, 96, nested=True), stored.bitsandbytes),
    "bitsandbytes, stored as bfloat16": (
        BNB,
        lambda: stored.draw_bitsandbytes(rng(), 24, 96, storage="<u2"),
        stored.bitsandbytes,
    ),
    "bitsandbytes, 8 bit": (BNB8, lambda: stored.draw_bitsandbytes_8(rng(), 24, 96), stored.bitsandbytes),
    "HQQ, 8 bit": (HQQ, lambda: stored.draw_hqq(rng(), 24, 96, 8, 32, 1), stored.hqq),
    "HQQ, groups of 16": (HQQ, lambda: stored.draw_hqq(rng(), 24, 96, 4, 16, 1), stored.hqq),
    "HQQ, groups of rows, more than are converted at once": (
        HQQ,
        lambda: stored.draw_hqq(rng(), 1032, 160, 4, 24, 0),
        stored.hqq,
    ),
    "HQQ, one bit, groups of rows": (HQQ, lambda: stored.draw_hqq(rng(), 24, 96, 1, 8, 0), stored.hqq),
    "MXFP8": (
        {"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"]},
        lambda: stored.draw_exponents(rng(), 24, 96, (1, 32)),
        lambda p: stored.fp8(p, (1, 32)),
    ),
    "FP8, blocks with exponents": (
        {**FP8, "weight_block_size": [16, 40], "scale_fmt": "ue8m0", "expert_dtype": "fp8"},
        lambda: stored.draw_exponents(rng(), 24, 96, (16, 40), "|V1"),
        lambda p: stored.fp8(p, (16, 40)),
    ),
    "FP8 of fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda: draw_fp8(rng(), 24, 96, (1, 96)),
        lambda p: stored.fp8(p, (1, 96)),
    ),
    "FP8, one scale": (FP8, lambda: draw_fp8(rng(), 24, 96, (24, 96)), lambda p: stored.fp8(p, (24, 96))),
    "FP8, a scale per row": (COMPRESSED, lambda: draw_fp8(rng(), 24, 96, (1, 96)), lambda p: stored.fp8(p, (1, 96))),
    "FP8, blocks of more rows than are converted at once": (
        {**FP8, "weight_block_size": [100, 64]},
        lambda: draw_fp8(rng(), 1032, 160, (100, 64), "weight_scale_inv"),
        lambda p: stored.fp8(p, (100, 64)),
    ),
    "FP8, blocks": (
        {**FP8, "weight_block_size": [16, 40]},
        lambda: draw_fp8(rng(), 24, 96, (16, 40), "weight_scale_inv"),
        lambda p: stored.fp8(p, (16, 40)),
    ),
}


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_eight_bits_change_by_a_250th_of_the_largest_of_32(tmp_path, name):
    quantization, draw, loop = EIGHT_BIT[name]
    parts = draw()
    tensor = read(tmp_path, quantization, parts)["w.weight"]
    want = loop(parts)
    assert tensor.quant is Quant.Q8_0
    assert tensor.shape == want.shape
    assert (np.abs(tensor.dequantize() - want) <= blocks_max(want) / 250).all()


UNEVEN = {
    "AWQ": (AWQ, lambda: draw_awq(rng(), 16, 40, 32), lambda p: stored.awq(p, 32)),
    "GPTQ": (GPTQ, lambda: draw_gptq(rng(), 16, 40, 32), lambda p: stored.gptq(p, 32)),
    "FP8": (FP8, lambda: draw_fp8(rng(), 16, 40, (16, 40)), lambda p: stored.fp8(p, (16, 40))),
    "compressed-tensors, words": (
        compressed(PACKED, {**W4_UNEVEN, "group_size": -1, "strategy": "channel"}),
        lambda: draw_packed(rng(), 16, 37, 0, symmetric=False),
        lambda p: stored.compressed_integers(p, 0),
    ),
    "compressed-tensors, int8": (
        compressed(INT, W8),
        lambda: draw_int8(rng(), 16, 37),
        lambda p: stored.compressed_integers(p, 0),
    ),
    "NVFP4": (compressed(NVFP4, FP4), lambda: stored.draw_nvfp4(rng(), 16, 48), stored.nvfp4),
    "bitsandbytes": (BNB, lambda: stored.draw_bitsandbytes(rng(), 5, 37), stored.bitsandbytes),
    "bitsandbytes, 8 bit": (BNB8, lambda: stored.draw_bitsandbytes_8(rng(), 24, 37), stored.bitsandbytes),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_columns_that_are_not_a_multiple_of_32_stay_floats(tmp_path, name):
    quantization, draw, loop = UNEVEN[name]
    parts = draw()
    tensor = read(tmp_path, quantization, parts)["w.weight"]
    assert tensor.quant is Quant.F32
    np.testing.assert_allclose(tensor.dequantize(), loop(parts), rtol=1e-6)


@pytest.mark.parametrize("made", HQQ_MADE, ids=lambda made: f"{made['nbits']} bit, axis {made['axis']}")
def test_matrices_that_hqq_made_are_read(tmp_path, made):
    """Groups of 8 columns or rows become 8 bit."""
    numbers = {name: np.array(made[name], "<i4") for name in ("nbits", "group_size", "axis")}
    floats = {name: np.array(made[name], "<f2") for name in ("scale", "zero")}
    stored_as = "<f2" if made["as_floats"] else "|i1"
    packed = np.array(made["W_q"], np.uint8).view(stored_as)
    parts = {"W_q": packed, **numbers, **floats, "shape": np.array(made["shape"], "<i8")}
    want = np.array(made["values"])
    got = read(tmp_path, HQQ, parts)["w.weight"].dequantize()
    assert (np.abs(got - want) <= blocks_max(want) / 250).all()


def test_every_value_of_fp8_is_read(tmp_path):
    weight = np.arange(256, dtype=np.uint8)
    weight[127] = weight[255] = 0
    parts = {"weight": np.tile(weight, (3, 1))[:, :250], "weight_scale": np.array(1, "<f4")}
    got = read(tmp_path, FP8, parts)["w.weight"].dequantize()
    np.testing.assert_array_equal(got, stored.fp8(parts, (3, 250)))


def test_blocks_of_tiny_weights_are_not_clipped(tmp_path):
    """The scales are the smallest float16."""
    parts = {"weight": np.full((1, 32), 0x7E, np.uint8), "weight_scale": np.array(3e-8, "<f4")}
    tensor = read(tmp_path, FP8, parts)["w.weight"]
    assert (np.abs(tensor.dequantize() - stored.fp8(parts, (1, 32))) <= 2.0**-24).all()


@pytest.mark.parametrize("scale", [1e-7, 4096])
@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_scales_are_read(tmp_path, scale, bits):
    """Scales become float16: the small ones lose bits, the large ones fit."""
    parts = {**draw_gptq(rng(), 16, 96, 32, bits), "scales": np.full((3, 16), scale, "<f4")}
    want = stored.gptq(parts, 32, bits)
    got = read(tmp_path, {**GPTQ, "bits": bits}, parts)["w.weight"].dequantize()
    bound = scale / 64 if bits == 4 else blocks_max(want) / 250
    assert (np.abs(got - want) <= bound + 1e-6).all()


@pytest.mark.parametrize("scale", [1e-8, 8.9e-8, 1e-7, 3e-5])
def test_integers_of_small_scales_change_by_4e_6(tmp_path, scale):
    parts = {**draw_int8(rng(), 16, 96), "weight_scale": np.full((16, 1), scale, "<f4")}
    want = stored.compressed_integers(parts, 0)
    got = read(tmp_path, compressed(INT, W8), parts)["w.weight"].dequantize()
    assert (np.abs(got - want) <= blocks_max(want) / 250 + 4e-6).all()


def test_scales_in_bf16_are_read(tmp_path):
    parts = draw_fp8(rng(), 24, 96, (1, 96))
    exact = (parts["weight_scale"].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    upper = (exact.view(np.uint32) >> 16).astype("<u2")
    want = stored.fp8({**parts, "weight_scale": exact}, (1, 96))
    tensor = read(tmp_path, COMPRESSED, {**parts, "weight_scale": upper})["w.weight"]
    assert (np.abs(tensor.dequantize() - want) <= blocks_max(want) / 250).all()


@pytest.mark.parametrize(
    ("quantization", "parts"),
    [
        (AWQ, draw_awq(rng(), 24, 96, 32)),
        (GPTQ, draw_gptq(rng(), 24, 96, 32)),
        (FP8, draw_fp8(rng(), 24, 96, (1, 96))),
        (compressed(PACKED, W4_UNEVEN), draw_packed(rng(), 24, 96, 32, symmetric=False)),
        (compressed(INT, W8), draw_int8(rng(), 24, 96)),
        (compressed("mxfp4-pack-quantized", {**FP4, "group_size": 32}), stored.draw_mxfp4(rng(), 24, 96)),
        (MODELOPT, stored.draw_modelopt(rng(), 24, 96)),
        (NESTED, stored.draw_bitsandbytes(rng(), 24, 37, nested=True)),
        (HQQ, stored.draw_hqq(rng(), 24, 96, 2, 32, 1)),
        (HQQ, stored.draw_hqq(rng(), 24, 96, 2, 8, 0)),
    ],
    ids=["AWQ", "GPTQ", "FP8", "words", "int8", "MXFP4", "NVFP4", "bitsandbytes", "HQQ", "HQQ by rows"],
)
def test_rows_of_a_matrix_are_those_of_the_whole(tmp_path, quantization, parts):
    rows = read(tmp_path, quantization, parts)["w.weight"].stored
    data = rows.read()
    assert data.nbytes == rows.nbytes
    for part in (slice(3, 17), slice(23, 40), slice(5, 5), slice(7, 2)):
        np.testing.assert_array_equal(rows[part].read(), data[part])
        assert len(rows[part]) == len(data[part])
    np.testing.assert_array_equal(rows[4:20][2:9].read(), data[6:13])


def test_scales_of_activations_and_keys_are_left_out(tmp_path):
    one = np.ones(1, "<f4")
    parts = {**draw_fp8(rng(), 24, 96, (24, 96)), "input_scale": one, "k_scale": one, "bias": np.zeros(24, "<f4")}
    parts["activation_scale"] = np.array(1, "<f4")
    assert read(tmp_path, FP8, parts).keys() == {"w.weight", "w.bias"}


def test_groups_of_several_formats_are_read(tmp_path):
    """Settings for the inputs of products have no effect."""
    config = compressed("mixed-precision", W4, FP4, WFP8, kv_cache_scheme={"num_bits": 8, "type": "float"})
    for group, form in zip(config["config_groups"].values(), (PACKED, NVFP4, "float-quantized"), strict=True):
        group |= {"format": form, "input_activations": {"num_bits": 8, "dynamic": True}}
    config["config_groups"]["keys"] = {"targets": ["Attention"], "weights": None}
    one = np.ones(1, "<f4")
    drawn = {"a.": draw_packed(rng(), 8, 96, 32), "b.": stored.draw_nvfp4(rng(), 8, 96), "c.": F}
    parts = {stem + name: array for stem, own in drawn.items() for name, array in own.items()}
    parts |= {"b.input_global_scale": one, "c.input_zero_point": one}
    got = read(tmp_path, config, parts)
    assert got.keys() == {"w.a.weight", "w.b.weight", "w.c.weight"}
    for stem, loop in (("a.", lambda p: stored.compressed_integers(p, 32)), ("b.", stored.nvfp4)):
        want = loop(drawn[stem])
        assert (np.abs(got[f"w.{stem}weight"].dequantize() - want) <= blocks_max(want) / 250).all()


def test_a_factor_of_nvfp4_beside_words_is_not_one_of_the_words(tmp_path):
    parts = {**P, "weight_global_scale": np.ones(1, "<f4")}
    got = read(tmp_path, compressed(PACKED, W4), parts)
    np.testing.assert_array_equal(got["w.weight"].dequantize(), stored.compressed_integers(P, 32))
    assert got.keys() == {"w.weight", "w.weight_global_scale"}, "which no model has"


@pytest.mark.parametrize("block", [(1, 4096), (1, 32), (128, 128)])
def test_rows_in_fp8_take_the_memory_of_rows(tmp_path, block):
    size = 1024, 4096
    parts = {"weight": np.zeros(size, np.uint8), "weight_scale": np.ones((1024 // block[0], 4096 // block[1]), "<f4")}
    tensor = read(tmp_path, {**FP8, "weight_block_size": list(block)}, parts)["w.weight"]
    tracemalloc.start()
    tensor.stored[:8].read()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


def test_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path):
    parts = stored.draw_modelopt(rng(), 16, 96)
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    want = read(tmp_path / "other", MODELOPT, parts)["w.weight"]
    np.testing.assert_array_equal(read(tmp_path, None, parts)["w.weight"].dequantize(), want.dequantize())
    assert read(tmp_path, {**MODELOPT, "quant_algo": "nvfp4"}, parts)["w.weight"].quant is Quant.Q8_0
    beside.write_text(json.dumps({"quantization": {**own, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(
        ModelError, match=r"hf_quant_config\.json: quantization_config\.quant_algo is 'w4a8_awq', which"
    ):
        read(tmp_path, None, parts)
    beside.write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization is None, not a JSON object"):
        read(tmp_path, None, parts)
    beside.write_text(json.dumps({"quantization": GPTQ}))
    with pytest.raises(
        ModelError, match=r"quant_method is 'gptq', which is not supported\. Use a checkpoint of modelopt"
    ):
        read(tmp_path, None, draw_gptq(rng(), 16, 96, 32))


@pytest.mark.parametrize("own", [{}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}])
def test_modelopt_may_quantise_no_matrix(tmp_path, own):
    parts = {"weight": np.ones((16, 96), "<f4"), "k_proj.k_scale": np.ones(1, "<f4")}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    for quantization in (None, {"quant_method": "modelopt", **own}):
        assert list(read(tmp_path, quantization, parts)) == ["w.weight"]
    with pytest.raises(ModelError, match=r"quantization_config\.rotation = True is not supported"):
        read(tmp_path, {"quant_method": "modelopt", **own, "rotation": True}, parts)


def quantized_model(folder, name, quantization, draw, loop):
    """A tiny model whose projections are drawn, and the same as floats: two directories."""
    tiny = TINY[name]
    plain, turned = random_tensors(tiny["shapes"]), partial(is_turned, tiny["shapes"])
    drawn = re.compile(r"(_proj|\.w\d|\.c_\w+)\.weight")
    tensors, floats = stored.drawn_instead(plain, draw, loop, lambda name, _: drawn.search(name), turned)
    config = {**tiny["config"], "quantization_config": quantization}
    return write_model(folder / "quantized", config, tensors), write_model(folder / "floats", tiny["config"], floats)


MODELS = {
    "llama3, AWQ": ("llama3", AWQ, lambda r, o, i: draw_awq(r, o, i, 32), lambda p: stored.awq(p, 32)),
    "phi3, AWQ": ("phi3", AWQ, lambda r, o, i: draw_awq(r, o, i, 32), lambda p: stored.awq(p, 32)),
    "qwen2, GPTQ": ("qwen2", GPTQ, lambda r, o, i: draw_gptq(r, o, i, 32), lambda p: stored.gptq(p, 32)),
    "gpt2, GPTQ": ("gpt2", GPTQ, lambda r, o, i: draw_gptq(r, o, i, 32), lambda p: stored.gptq(p, 32)),
    "llama3, HQQ": ("llama3", HQQ, lambda r, o, i: stored.draw_hqq(r, o, i, 4, 8, 1), stored.hqq),
    "gpt2, FP8": ("gpt2", FP8, lambda r, o, i: draw_fp8(r, o, i, (o, i)), lambda p: stored.fp8(p, (999, 999))),
    "llama3, compressed-tensors": (
        "llama3",
        compressed(PACKED, W4_UNEVEN),
        lambda r, o, i: draw_packed(r, o, i, 32, symmetric=False),
        lambda p: stored.compressed_integers(p, 32),
    ),
    "qwen2, int8": ("qwen2", compressed(INT, W8), draw_int8, lambda p: stored.compressed_integers(p, 0)),
    "nanochat, NVFP4": ("nanochat", MODELOPT, stored.draw_modelopt, stored.nvfp4),
    "gpt2, bitsandbytes": ("gpt2", BNB, stored.draw_bitsandbytes, stored.bitsandbytes),
    "gemma3, FP8": ("gemma3", FP8, lambda r, o, i: draw_fp8(r, o, i, (o, i)), lambda p: stored.fp8(p, (999, 999))),
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_gives_nearly_the_logits_of_its_weights_as_floats(tmp_path, name, executor):
    models = [load_model(folder) for folder in quantized_model(tmp_path, *MODELS[name])]
    [got], [want] = (all_logits(model, [TEXT], whole([TEXT]), executor) for model in models)
    assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_a_symmetric_gptq_model_gives_the_logits_of_its_weights_as_floats(tmp_path, name, executor):
    def draw(random, out, inner):
        return draw_gptq(random, out, inner, 32, zero=7)

    folders = quantized_model(tmp_path, name, GPTQ, draw, lambda p: stored.gptq(p, 32))
    [got], [want] = (all_logits(load_model(folder), [TEXT], whole([TEXT]), executor) for folder in folders)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_what_was_converted_to_what_is_told(tmp_path):
    def told(quantization, parts):
        return conversions(read(tmp_path, quantization, parts).values())

    [awq] = told(AWQ, {f"{i}.{name}": array for i in range(3) for name, array in draw_awq(rng(), 8, 96, 32).items()})
    assert awq == (
        "matrices converted from AWQ (4 bit, groups of 32) to Q4_1: 3. A weight changes by at most 1/64 of its scale"
    )
    assert told({**GPTQ, "bits": 8}, draw_gptq(rng(), 16, 96, 32, 8, g_idx=MIXED)) == [
        "matrices converted from GPTQ (8 bit, groups of 32 of any columns) to Q8_0: 1. "
        "A weight changes by at most 1/250 of the largest of 32 weights"
    ]
    for block, words in (((16, 40), "16 × 40 weights"), ((1, 96), "row"), ((24, 96), "matrix")):
        [fp8] = told({**FP8, "weight_block_size": [16, 40]}, draw_fp8(rng(), 24, 96, block))
        assert fp8.startswith(f"matrices converted from FP8 with a scale per {words} to Q8_0: 1.")


def test_an_unquantised_model_has_no_conversions(tmp_path):
    tiny = TINY["llama3"]
    folder = write_model(tmp_path / "model", tiny["config"], random_tensors(tiny["shapes"]))
    assert conversions(load_model(folder).weights.values()) == []


def with_nan(parts, name):
    damaged = parts[name].copy()
    damaged.reshape(-1)[0] = np.nan
    return {**parts, name: damaged}


def without(parts, name):
    return {key: value for key, value in parts.items() if key != name}


A, G, F = draw_awq(rng(), 16, 96, 32), draw_gptq(rng(), 16, 96, 32), draw_fp8(rng(), 16, 96, (1, 96))
MX, H = stored.draw_mxfp4(rng(), 16, 128), stored.draw_hqq(rng(), 16, 96, 4, 32, 1)
P, N, M = draw_packed(rng(), 16, 96, 32), stored.draw_nvfp4(rng(), 16, 96), stored.draw_modelopt(rng(), 16, 96)
B, BN = (stored.draw_bitsandbytes(rng(), 16, 96, nested=nested) for nested in (False, True))
draw_8, STATE = stored.draw_bitsandbytes_8(rng(), 16, 96), "weight.quant_state.bitsandbytes__nf4"


def state(parts=B, **changes):
    text = json.dumps({**json.loads(parts[STATE].tobytes()), **changes}).encode()
    return {**parts, STATE: np.frombuffer(text, np.int8)}


ONE = {"plain": np.ones((1, 2), "<f4")}


@pytest.mark.parametrize(
    ("quantization", "parts", "message"),
    [
        ("awq", A, "quantization_config is 'awq', not a JSON object"),
        ({}, A, "quantization_config.quant_method is '', which is not supported. Use a checkpoint of fp8, "),
        ({"quant_method": 4}, A, "quantization_config.quant_method is 4, not of type str"),
        ({"quant_method": "exl3"}, A, r"quant_method is 'exl3', which is not supported\. Use a checkpoint of fp8, "),
        (
            {"quant_method": "AQLM"},
            A,
            r"'AQLM', which is not supported: weights are sums of vectors from codebooks\. Use a checkpoint of fp8, ",
        ),
        ({"quant_method": "hqq"}, H, r"quant_config is None, not a JSON object"),
        (
            {**HQQ, "quant_config": {"self_attn.q_proj": {"nbits": 4}}},
            H,
            r"quant_config 'self_attn\.q_proj' is \{'nbits': 4\}, not an object with weight_quant_params",
        ),
        (
            {**HQQ, "quant_config": {"weight_quant_params": {**OF_HQQ, "rotation": 0}}},
            H,
            r"weight_quant_params: rotation = 0 is not supported",
        ),
        (
            {**HQQ, "quant_config": {**HQQ["quant_config"], "zero_quant_params": {"nbits": 8}}},
            H,
            r"zero_quant_params = \{'nbits': 8\} is not supported",
        ),
        (HQQ, {**H, "nbits": np.array(3, "<i4")}, r"tensor 'w\.nbits': 3 bit are not supported.* of 1, 2, 4, 8 bit"),
        (HQQ, without(H, "axis"), r"tensor 'w\.W_q': comes without w\.axis"),
        (HQQ, without(H, "zero"), r"tensor 'w\.W_q': comes without w\.zero"),
        (HQQ, {**H, "axis": np.array(2, "<i4")}, r"does not fit shape \[16, 96\], 4 bit, groups of 32 along axis 2"),
        (HQQ, {**H, "group_size": np.array(36, "<i4")}, r"does not fit shape \[16, 96\], 4 bit, groups of 36"),
        (HQQ, {**H, "shape": np.array([16, 95], "<i8")}, r"does not fit shape \[16, 95\], 4 bit, groups of 32"),
        (HQQ, {**H, "zero": np.ones((47, 1), "<f4")}, r"tensor 'w\.zero': shape \(47, 1\) does not fit"),
        (HQQ, {**H, "axis": np.array(1, "<f4")}, r"tensor 'w\.axis': dtype is F32, expected I32, I64, U8"),
        (HQQ, {**H, "quant_zero": np.array(1, "|i1")}, "zero points that are quantised are not supported"),
        (HQQ, {**H, "quant_scale": np.array(1, "<f2")}, "zero points that are quantised are not supported"),
        (HQQ, {**H, "group_size": np.array([32, 7], "<i4")}, r"'w\.group_size': has 2 numbers, expected 1"),
        (HQQ, {**H, "shape": np.array(16, "<i8")}, r"'w\.shape': has 1 numbers, expected 2"),
        ({**FP8, "expert_dtype": "fp4"}, F, "expert_dtype is 'fp4', which is not supported"),
        ({**FP8, "offset": 0}, F, r"quantization_config\.offset = 0 is not supported"),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": WFP8, "transform": 1}}},
            F,
            r"config_groups\.a: transform = 1 is not supported",
        ),
        (None, A, r"tensor 'w\.qweight': dtype 'I32' is not supported"),
        (None, F, r"tensor 'w\.weight': dtype 'F8_E4M3' is not supported"),
        (AWQ, ONE, "quantization_config says awq, but no weight is stored so"),
        (FP8, ONE, "quantization_config says fp8, but no weight is stored so"),
        ({**AWQ, "bits": 8}, A, "quantization_config.bits is 8, which is not supported for awq"),
        ({**AWQ, "bits": "4"}, A, "quantization_config.bits is '4', not of type int"),
        ({**AWQ, "version": "gemv"}, A, "quantization_config.version is 'gemv', which is not supported"),
        ({**AWQ, "zero_point": False}, A, "quantization_config.zero_point = false is not supported"),
        ({**AWQ, "group_size": 0}, A, "quantization_config.group_size is 0"),
        ({**AWQ, "group_size": None}, A, "quantization_config.group_size is missing"),
        ({**AWQ, "group_size": 64}, A, r"tensor 'w\.qzeros': shape \(3, 2\) does not fit .*expected \(2, 2\)"),
        ({**GPTQ, "bits": 3}, G, "quantization_config.bits is 3, which is not supported for gptq"),
        ({**GPTQ, "bits": 8}, G, r"tensor 'w\.qzeros': shape \(3, 2\) does not fit a matrix \(16, 48\)"),
        ({**GPTQ, "checkpoint_format": "marlin"}, G, "checkpoint_format is 'marlin', which is not supported"),
        ({**GPTQ, "format": "marlin"}, G, "quantization_config.format is 'marlin', which is not supported"),
        ({**GPTQ, "is_marlin_format": True}, G, "quantization_config.is_marlin_format = True is not supported"),
        (
            {**GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq"},
            G,
            "quantization_config.format is 'gptq_v2', checkpoint_format is 'gptq'",
        ),
        (AWQ, G, r"tensor 'w\.qzeros': shape \(3, 2\) does not fit"),
        (AWQ, without(A, "qzeros"), r"tensor 'w\.qweight': comes without w\.qzeros"),
        (AWQ, without(A, "scales"), r"tensor 'w\.qweight': comes without w\.scales"),
        (AWQ, {**A, "qweight": A["qweight"].astype("<f4")}, r"tensor 'w\.qweight': dtype is F32, expected I32"),
        (AWQ, {**A, "scales": np.ones((3, 16), "<i4")}, r"tensor 'w\.scales': dtype is I32, expected float"),
        (AWQ, {**A, "qweight": A["qweight"][None]}, r"shape \(1, 96, 2\) is not of a matrix"),
        (AWQ, with_nan(A, "scales"), r"tensor 'w\.scales': scale nan is not a number of at most 4096"),
        (GPTQ, {**G, "scales": G["scales"] + np.float16(np.inf)}, r"tensor 'w\.scales': scale inf is not"),
        (GPTQ, {**G, "g_idx": np.full(96, 3, "<i4")}, r"tensor 'w\.g_idx': a group is not from 0 to 2"),
        (GPTQ, {**G, "g_idx": np.full(96, -1, "<i4")}, r"tensor 'w\.g_idx': a group is not from 0 to 2"),
        (GPTQ, {**G, "g_idx": np.zeros(95, "<i4")}, r"tensor 'w\.g_idx': shape \(95,\) does not fit"),
        (GPTQ, {**G, "weight": np.ones((16, 96), "<f4")}, r"tensor 'w\.weight': is there twice, once quantised"),
        (FP8, without(F, "weight_scale"), r"tensor 'w\.weight': comes without w\.weight_scale"),
        (FP8, with_nan(F, "weight_scale"), r"tensor 'w\.weight_scale': scale nan is not"),
        (FP8, {**F, "weight_scale": np.full((16, 1), 1e9, "<f4")}, r"scale 1000000000\.0 is not"),
        (FP8, {**F, "weight_scale": np.ones((15, 1), "<f4")}, r"shape \(15, 1\) does not fit a matrix \(16, 96\)"),
        (FP8, {**F, "weight_scale": np.ones((2, 3), "<f4")}, "with no weight_block_size"),
        (FP8, {**F, "weight": F["weight"][None]}, r"shape \(1, 16, 96\) in FP8 is not of a matrix"),
        ({**FP8, "weight_block_size": [0, 8]}, F, r"weight_block_size is \[0, 8\], not two sizes"),
        ({**FP8, "weight_block_size": 8}, F, "weight_block_size is 8, not a list"),
        (
            {**COMPRESSED, "transform_config": {"R1": 1}},
            F,
            "quantization_config.transform_config = .* is not supported",
        ),
        ({**GPTQ, "dynamic": {"x": {"bits": 8}}}, G, "quantization_config.dynamic = .* is not supported"),
        ({**COMPRESSED, "format": "marlin-24"}, F, "quantization_config.format is 'marlin-24', which is not"),
        ({**COMPRESSED, "format": PACKED}, F, "config_groups '' is None, not an object with weights"),
        (compressed(PACKED, W4, sparsity_config={"format": "sparse-24-bitmask"}), P, "sparsity_config = .* is not"),
        (compressed(PACKED, W4, sparsity_config=4), P, "quantization_config.sparsity_config = 4 is not supported"),
        (compressed(PACKED, {**W4, "num_bits": 3}), P, r"config_groups\.group_0\.weights: .*num_bits = 3 is not"),
        (compressed(PACKED, {**W4, "num_bits": "4"}), P, "num_bits is '4', not of type int"),
        (compressed(PACKED, {**W4, "type": "float"}), P, "type = 'float', num_bits = 4 is not supported"),
        (compressed(PACKED, {**W4, "dynamic": True}), P, "dynamic = True is not supported"),
        (
            compressed(PACKED, {**W4, "group_size": 10**300}),
            P,
            r"group_size = 1000\d+ is not from 1 to \d+, -1 or null",
        ),
        (compressed(PACKED, {**W4, "group_size": -5}), P, "group_size = -5 is not from 1 to"),
        (compressed(PACKED, {**W4, "group_size": 16}), P, r"scales \(16, 3\), which fits none of: .*groups of 16"),
        (compressed(PACKED, {**W4, "num_bits": 8}), P, r"scales \(16, 3\), which fits none of: .*8 bit, groups of 32"),
        (
            compressed(PACKED, W4_UNEVEN),
            P,
            "is pack-quantized, symmetric, .* fits none of: pack-quantized, not symmetric, 4 bit",
        ),
        (compressed(INT, W8), P, "is pack-quantized, .* which fits none of"),
        (compressed(PACKED, {**W4, "actorder": "group"}), P, r"comes without w\.weight_g_idx"),
        ({**GPTQ, "desc_act": True}, G, r"comes without w\.g_idx"),
        (
            compressed(INT, {**W8, "strategy": "block", "block_structure": [4, 24]}),
            draw_int8(rng(), 16, 96, (4, 4)),
            r"block_structure = \[4, 24\] is not supported for int-quantized",
        ),
        (
            compressed("mxfp4-pack-quantized", {**FP4, "group_size": 64}),
            {**MX, "weight_scale": MX["weight_scale"][:, ::2]},
            r"tensor 'w\.weight_packed': shape \(16, 64\) does not fit scales \(16, 2\)",
        ),
        (
            compressed("mxfp4-pack-quantized", {**FP4, "group_size": 32}),
            {**MX, "weight_packed": MX["weight_packed"][:, :50]},
            r"shape \(16, 50\) does not fit scales \(16, 4\)",
        ),
        (compressed("mixed-precision", W4), P, "format = 'mixed-precision', type = 'int', num_bits = 4 is not"),
        (
            compressed("float-quantized", {**WFP8, "block_structure": [0, 8]}),
            F,
            r"block_structure is \[0, 8\], not two",
        ),
        (
            {"quant_method": "compressed-tensors", "format": PACKED, "config_groups": {"g": {**W4, "weights": 4}}},
            P,
            "config_groups 'g' is .* not an object with weights",
        ),
        (compressed(PACKED, W4), without(P, "weight_scale"), r"comes without w\.weight_scale"),
        (compressed(PACKED, W4), without(P, "weight_shape"), r"comes without w\.weight_shape"),
        (compressed(PACKED, W4), with_nan(P, "weight_scale"), r"tensor 'w\.weight_scale': scale nan is not"),
        (compressed(PACKED, W4), {**P, "weight_shape": np.array([16, 88])}, r"\(16, 88\) with scales .* fits none"),
        (
            compressed(PACKED, W4),
            {**P, "weight_shape": np.array([17, 96])},
            r"\[17, 96\] does not fit \(16, 12\) words",
        ),
        (compressed(PACKED, W4), {**P, "weight_shape": np.array([16, 1 << 60])}, "does not fit"),
        (
            compressed(PACKED, W4),
            {**P, "weight_shape": np.array([[16, 96]])},
            r"tensor 'w\.weight_shape': shape \(1, 2\) is not of two sizes",
        ),
        (compressed(PACKED, W4), {**P, "weight_packed": P["weight_packed"][None]}, "is not of a matrix"),
        (compressed(PACKED, W4), {**P, "weight_packed": np.ones((16, 12), "<f4")}, "of F32 is not of a matrix"),
        (compressed(PACKED, W4), {**P, "weight_g_idx": np.full(96, 3, "<i4")}, "a group is not from 0 to 2"),
        (
            compressed(PACKED, W4_UNEVEN),
            {**P, "weight_zero_point": np.ones((3, 3), "<i4")},
            r"tensor 'w\.weight_zero_point': shape \(3, 3\) does not fit a matrix \(16, 96\) .*expected \(2, 3\)",
        ),
        (
            compressed(INT, W8_UNEVEN),
            {**draw_int8(rng(), 16, 96), "weight_zero_point": np.ones((16, 1), "<i4")},
            r"tensor 'w\.weight_zero_point': dtype is I32, expected I8",
        ),
        (compressed(NVFP4, {**FP4, "group_size": 32}), N, r"scales \(16, 6\), which fits none of"),
        (compressed(NVFP4, FP4), {**N, "weight_global_scale": np.zeros(1, "<f4")}, "is not one number above 0"),
        (compressed(NVFP4, FP4), {**N, "weight_scale": np.ones((16, 6), "<f4")}, "dtype is F32, expected F8_E4M3"),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, N, "quant_algo is 'w4a16_awq', which is not supported"),
        ({**MODELOPT, "quant_algo": "FP8"}, N, "says modelopt, but no weight is stored so"),
        (MODELOPT, without(M, "weight_scale_2"), r"comes without w\.weight_scale_2"),
        (MODELOPT, with_nan(M, "weight_scale_2"), r"tensor 'w\.weight_scale_2': \[nan\] is not one number above 0"),
        (MODELOPT, {**M, "weight_scale": M["weight_scale"][:, :5]}, r"shape \(16, 5\) does not fit pairs of columns"),
        ({**AUTOROUND, "packing_format": "auto_round:gptqmodel"}, G, "packing_format is 'auto_round:gptqmodel', which"),
        ({**AUTOROUND, "data_type": "nv_fp"}, G, "data_type is 'nv_fp', which is not supported"),
        ({"quant_method": "bitsandbytes"}, B, "load_in_4bit and load_in_8bit are both false"),
        ({**BNB, "load_in_8bit": True}, B, "load_in_4bit and load_in_8bit are both true"),
        ({**BNB, "bnb_4bit_quant_type": "int4"}, B, "bnb_4bit_quant_type is 'int4', which is not supported"),
        ({**BNB, "bnb_4bit_quant_type": "fp4"}, B, r"comes without w\.weight\.quant_state\.bitsandbytes__fp4"),
        ({**BNB, "llm_int8_has_fp16_weight": True}, B, "llm_int8_has_fp16_weight = True is not supported"),
        (NESTED, B, r"tensor 'w\.weight\.absmax': dtype is F32, expected U8"),
        (BNB, without(B, "weight.quant_map"), r"comes without w\.weight\.quant_map"),
        (BNB, {**B, "weight.quant_map": np.full(16, 2, "<f4")}, "holds other numbers than those from -1 to 1"),
        (BNB, {**B, "weight.absmax": np.ones(23, "<f4")}, r"absmax': has 23 numbers, expected 24"),
        (BNB, state(shape=[16, 97]), r"tensor 'w\.weight': has 768 bytes, which do not fit a matrix \[16, 97\]"),
        (BNB, state(shape=[16]), r"bitsandbytes__nf4': shape is \[16\], not of a matrix"),
        (BNB, state(blocksize=0), r"bitsandbytes__nf4': blocksize = 0 is not from 1 to 65536"),
        (BNB, state(quant_type="fp4"), "quant_type is 'fp4', not nf4"),
        (BNB, {**B, STATE: np.frombuffer(b"[1]", np.int8)}, "holds a list, not a JSON object"),
        (NESTED, state(BN, nested_offset=math.nan), "nested_offset is nan, not of type float"),
        (NESTED, state(BN, nested_offset=-1e9), "nested_offset = -1000000000.0 is not a number of at most 4096"),
        (BNB8, without(draw_8, "SCB"), r"comes without w\.SCB"),
        (BNB8, {**draw_8, "SCB": np.ones(15, "<f4")}, r"shape \(15,\) does not fit a matrix \(16, 96\)"),
        (BNB8, {**draw_8, "weight_format": np.ones(1, np.int8)}, r"tensor 'w\.weight_format': is not 0, the order of"),
        ({**FP8}, {**F, "other": np.ones(2, "<i4")}, r"tensor 'w\.other': dtype 'I32' is not supported"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(tmp_path, quantization, parts, message):
    with pytest.raises(ModelError, match=rf"({re.escape(str(tmp_path))}).*{message}"):
        read(tmp_path, quantization, parts)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_in_fp8_is_found_when_it_is_read(tmp_path, byte):
    parts = {**F, "weight": F["weight"].copy()}
    parts["weight"][3, 5] = byte
    tensor = read(tmp_path, FP8, parts)["w.weight"]
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor 'w\.weight': holds a NaN"):
        tensor.dequantize()


def test_a_scale_that_is_no_number_is_found_when_it_is_read(tmp_path):
    tensor = read(tmp_path, MODELOPT, {**M, "weight_scale": np.full((16, 6), 0x7F, np.uint8)})["w.weight"]
    with pytest.raises(ModelError, match=r"tensor 'w\.weight_scale': scale nan is not a number of at most 4096"):
        tensor.dequantize()
    tensor = read(tmp_path, BNB, with_nan(B, "weight.absmax"))["w.weight"]
    with pytest.raises(ModelError, match=r"tensor 'w\.weight\.absmax': scale nan is not a number of at most 4096"):
        tensor.dequantize()


def test_a_quantised_file_that_changes_is_an_error(tmp_path):
    tensor = read(tmp_path, AWQ, A)["w.weight"]
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelError, match="was changed while it was in use"):
        tensor.dequantize()
