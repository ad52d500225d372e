"""Checkpoints of MLX: matrices as loops over the definition of each format have them, and layouts as mlx_lm writes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import read_config
from foreword.models.loader import load_model
from foreword.models.quantized import conversions, read_weights
from foreword.models.quants import Quant
from foreword.models.safetensors import read_directory
from models.quantized_checkpoints import E2M1, e4m3
from models.recorded import TINY, assert_logits
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model, write_safetensors

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "models" / "mlx.json").read_text())
FORMS = [("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
FORMS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
EXACT = {2: Quant.Q4_1, 3: Quant.Q4_1, 4: Quant.Q4_1, 5: Quant.Q5_1}


def name_of(form):
    return "{}, {} bit, groups of {}".format(*form)


def draw(random, rows, columns, mode, bits, size):
    """Random parts of a matrix in a format, by their names."""
    words = random.integers(0, 1 << 32, (rows, columns * bits // 32), dtype="<u4")
    groups = rows, columns // size
    if mode == "affine":
        scales = (
            (random.random(groups) + 0.5).astype("<f2") / (1 << bits) * np.where(random.random(groups) < 0.5, 1, -1)
        )
        return {"weight": words, "scales": scales.astype("<f2"), "biases": random.standard_normal(groups).astype("<f2")}
    if mode == "mxfp8":
        words &= np.uint32(0xF7F7F7F7)  # no NaN
    scales = random.integers(40, 60, groups) if mode == "nvfp4" else random.integers(122, 129, groups)
    return {"weight": words, "scales": scales.astype("|i1")}


def weights_of(parts, mode, bits, size):
    """float64 [rows, columns], by a loop over single weights: the bits of a row are one number, lowest first."""
    words, scales = parts["weight"], np.asarray(parts["scales"])
    scales = scales.view(np.uint8) if scales.dtype == np.int8 else scales
    columns = words.shape[1] * 32 // bits
    out = np.empty((len(words), columns))
    for o, row in enumerate(words):
        number = sum(int(word) << 32 * i for i, word in enumerate(row))
        for i in range(columns):
            q, s = number >> bits * i & (1 << bits) - 1, scales[o, i // size]
            if mode == "affine":
                out[o, i] = float(s) * q + float(parts["biases"][o, i // size])
            elif mode == "mxfp8":
                out[o, i] = e4m3(q) * 2.0 ** (int(s) - 127)
            else:
                value = E2M1[q & 7] * (-1 if q & 8 else 1)
                out[o, i] = value * (e4m3(int(s)) if mode == "nvfp4" else 2.0 ** (int(s) - 127))
    return out


def settings(mode, bits, size):
    return {"group_size": size, "bits": bits, "mode": mode}


def read(folder, quantization, tensors, **config):
    folder.mkdir(exist_ok=True)
    both = {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**both, **config}))
    write_safetensors(folder / "model.safetensors", tensors)
    return read_weights(read_directory(folder), read_config(folder / "config.json"))


def under(prefix, parts):
    return {f"{prefix}.{name}": array for name, array in parts.items()}


def assert_near(tensor, want, mode, bits):
    got = tensor.dequantize()
    if mode == "mxfp4":
        assert tensor.quant is Quant.MXFP4
        np.testing.assert_array_equal(got, want)
    elif mode == "affine" and bits in EXACT:
        assert tensor.quant is EXACT[bits]
        np.testing.assert_allclose(got, want, atol=1e-6)
    else:
        assert tensor.quant is Quant.Q8_0
        largest = np.repeat(np.abs(want).reshape(len(want), -1, 32).max(-1), 32, axis=1)
        assert (np.abs(got - want) <= largest / 250).all()


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_matrices_have_the_weights_of_their_definition(tmp_path, form):
    parts = draw(np.random.default_rng(0), 24, 256, *form)
    tensors = read(tmp_path, settings(*form), under("w", parts))
    assert list(tensors) == ["w.weight"]
    assert tensors["w.weight"].shape == (24, 256)
    assert_near(tensors["w.weight"], weights_of(parts, *form), *form[:2])


@pytest.mark.parametrize(
    "made", RECORDED["matrices"], ids=lambda made: name_of((made["mode"], made["bits"], made["group_size"]))
)
def test_matrices_that_mlx_made_are_read(tmp_path, made):
    of_scales = "<u2" if made["mode"] == "affine" else "|i1"
    parts = {"weight": np.array(made["weight"], "<u4"), "scales": np.array(made["scales"]).astype(of_scales)}
    if "biases" in made:
        parts["biases"] = np.array(made["biases"], "<u2")
    form = made["mode"], made["bits"], made["group_size"]
    tensor = read(tmp_path, settings(*form), under("w", parts))["w.weight"]
    assert_near(tensor, np.array(made["values"]), *form[:2])


def test_layers_have_settings_of_their_own(tmp_path):
    random, whole_form, own = np.random.default_rng(0), ("affine", 4, 64), ("affine", 8, 32)
    some, other = draw(random, 8, 128, *whole_form), draw(random, 8, 128, *own)
    plain = random.standard_normal((8, 128)).astype("<f4")
    of_layers = {"b": settings(*own), "c": False, "absent": False}
    tensors = {**under("a", some), **under("b", other), "c.weight": plain}
    got = read(tmp_path, {**settings(*whole_form), **of_layers}, tensors)
    assert_near(got["a.weight"], weights_of(some, *whole_form), "affine", 4)
    assert_near(got["b.weight"], weights_of(other, *own), "affine", 8)
    np.testing.assert_array_equal(got["c.weight"].dequantize(), plain)
    assert conversions(got.values())[0].startswith("matrices converted from MLX (4 bit, groups of 64) to Q4_1: 1.")


def test_a_router_is_not_rounded_again(tmp_path):
    parts = draw(np.random.default_rng(0), 8, 128, "affine", 8, 64)
    tensor = read(tmp_path, settings("affine", 8, 64), under("layers.0.mlp.gate", parts))["layers.0.mlp.gate.weight"]
    assert tensor.quant is Quant.F32
    np.testing.assert_allclose(tensor.dequantize(), weights_of(parts, "affine", 8, 64), rtol=1e-6, atol=1e-6)


def test_weights_that_are_far_from_zero_become_8_bit(tmp_path):
    form = "affine", 4, 32
    parts = draw(np.random.default_rng(0), 8, 64, *form)
    parts = {
        "weight": parts["weight"],
        "scales": np.full((8, 2), 1e-4, "<f4"),
        "biases": np.full((8, 2), 1.0007, "<f4"),
    }
    tensor = read(tmp_path, settings(*form), under("w", parts))["w.weight"]
    assert_near(tensor, weights_of(parts, *form), "affine", 8)


W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MLX_NAMES = {"mixtral": W, "lfm2_moe": W, "nemotron_h": {"up_proj": "fc1", "down_proj": "fc2"}}


def as_mlx_has(tensors, kind):
    """The tensors that mlx_lm writes: experts stacked, convolutions turned, norms of some models plus one."""
    joined, out, own_names = {}, {}, MLX_NAMES.get(kind, {})
    for name, value in tensors.items():
        is_named_so = kind != "nemotron_h" or ".experts." in name
        own = ".".join(own_names.get(part, part) for part in name.split(".")) if is_named_so else name
        if kind.startswith(("qwen3_5", "qwen3_next")) and "mtp." in name:
            continue
        if found := re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", own):
            joined.setdefault(f"{found[1]}.switch_mlp.{found[3]}", {})[int(found[2])] = value
            continue
        if re.search(r"conv(1d)?\.weight$", name) and value.ndim == 3:
            value = np.ascontiguousarray(value.swapaxes(1, 2))
        plus_one = r"(input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight$"
        if kind.startswith(("qwen3_5", "qwen3_next")) and re.search(plus_one, name):
            value = value + np.float32(1)
        out[f"language_model.{own}" if kind.startswith("qwen3_5") else own] = value
    stacked = {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in joined.items()}
    return {**out, **stacked}


def mlx_model(folder, name):
    tiny = TINY[name]
    kind = tiny["config"]["model_type"]
    tensors = as_mlx_has(random_tensors(tiny["shapes"]), kind)
    config = tiny["config"]
    if kind.startswith("qwen3_5"):
        config = {"model_type": kind.removesuffix("_text"), "vocab_size": config["vocab_size"], "text_config": config}
    return tensors, write_model(folder, config, tensors)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", RECORDED["layouts"])
def test_the_layout_of_mlx_is_read(tmp_path, name, executor):
    tensors, folder = mlx_model(tmp_path, name)
    want = RECORDED["layouts"][name]
    assert {key: list(value.shape) for key, value in tensors.items()} == {
        key: shape for key, (shape, _) in want.items()
    }
    sums = {key: float(np.asarray(value, np.float64).sum()) for key, value in tensors.items()}
    assert sums == pytest.approx({key: total for key, (_, total) in want.items()}, abs=1e-4)
    assert_logits(load_model(folder), name, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_model_with_experts_in_4_bit_gives_the_logits_of_its_weights_as_floats(tmp_path, executor):
    tiny, form = TINY["mixtral"], ("affine", 4, 32)
    plain = as_mlx_has(random_tensors(tiny["shapes"]), "mixtral")
    stored, floats = {}, {}
    for name, value in plain.items():
        if value.ndim > 1 and value.shape[-1] % 32 == 0:
            parts = draw(np.random.default_rng(0), int(np.prod(value.shape[:-1])), value.shape[-1], *form)
            parts["scales"] = (parts["scales"] * 0.2).astype("<f2")
            parts["biases"] = (parts["biases"] * 0.1).astype("<f2")
            floats[name] = weights_of(parts, *form).astype("<f4").reshape(value.shape)
            path = name.removesuffix("weight")
            stored |= {path + key: array.reshape(*value.shape[:-1], -1) for key, array in parts.items()}
        else:
            stored[name] = floats[name] = value
    both = {"quantization": settings(*form), "quantization_config": settings(*form)}
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    models = [
        load_model(write_model(tmp_path / "stored", {**tiny["config"], **both}, stored)),
        load_model(write_model(tmp_path / "floats", tiny["config"], floats)),
    ]
    [got], [want] = (all_logits(model, [text], whole([text]), executor) for model in models)
    np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())


W4 = draw(np.random.default_rng(0), 8, 128, "affine", 4, 64)


@pytest.mark.parametrize(
    ("quantization", "parts", "message"),
    [
        ({"group_size": 64, "bits": 7}, W4, "quantization_config.bits is 7, which is not supported in mode affine"),
        ({"group_size": 16, "bits": 4}, W4, "quantization_config.group_size is 16, which is not supported"),
        ({"bits": 4}, W4, "quantization_config.group_size is missing"),
        ({"group_size": 64, "bits": 4, "mode": "mxfp3"}, W4, "quantization_config.mode is 'mxfp3', which is not"),
        ({"group_size": 64, "bits": 4, "rotated": True}, W4, "quantization_config.rotated = True is not supported"),
        ({"group_size": 64, "bits": 4, "w": False}, W4, "w has scales, and quantization says False"),
        (
            {"group_size": 64, "bits": 4, "w": {"group_size": 64, "bits": 4, "global_scale": True}},
            W4,
            r"config\.json: w: quantization_config\.global_scale = True is not supported",
        ),
        ({"group_size": 32, "bits": 4}, W4, r"shape \(8, 16\) with scales \(8, 2\) is not of 4 bit in groups of 32"),
        ({"group_size": 64, "bits": 4}, {k: W4[k] for k in ("weight", "scales")}, "comes without w.biases"),
        (
            {"group_size": 64, "bits": 4},
            {**W4, "biases": W4["biases"][:4]},
            r"shape \(4, 2\) is not that of the scales",
        ),
        ({"group_size": 64, "bits": 4}, {**W4, "weight": W4["weight"].view("<i4")}, "dtype is I32, expected U32"),
        ({"group_size": 64, "bits": 4}, {"weight": np.ones((8, 128), "<f4")}, "but no weight is stored so"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, quantization, parts, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, quantization, under("w", parts))


def test_settings_of_a_layer_that_is_not_quantised_are_refused(tmp_path):
    tensors = {**under("w", W4), "c.weight": np.ones((8, 128), "<f4")}
    with pytest.raises(ModelError, match=r"quantization_config\.c = \{'group_size': 64.* is not supported"):
        read(tmp_path, {**settings("affine", 4, 64), "c": settings("affine", 8, 64)}, tensors)


def test_two_settings_that_differ_are_refused(tmp_path):
    with pytest.raises(ModelError, match="quantization_config differs from quantization"):
        read(tmp_path, settings("affine", 4, 64), under("w", W4), quantization_config=settings("affine", 8, 64))


def test_falcon_h1_is_refused(tmp_path):
    tiny = TINY["falcon-h1"]
    folder = write_model(tmp_path, tiny["config"], as_mlx_has(random_tensors(tiny["shapes"]), "falcon_h1"))
    with pytest.raises(ModelError, match="MLX has multiplied the weights of this falcon_h1 model"):
        load_model(folder)


@pytest.mark.parametrize("scale", [140, 254, 255])
def test_scales_of_mxfp8_that_no_float16_holds_are_refused(tmp_path, scale):
    parts = draw(np.random.default_rng(0), 8, 64, "mxfp8", 8, 32)
    parts["scales"] = np.full((8, 2), scale, np.uint8).view("|i1")
    tensor = read(tmp_path, settings("mxfp8", 8, 32), under("w", parts))["w.weight"]
    with pytest.raises(ModelError, match=r"'w\.scales': scale \S+ is not a number of at most 4096"):
        tensor.dequantize()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "block_sparse_moe.experts.1.w1.weight",
            (40, 32),
            r"experts\.1\.w1\.weight is there twice, once as MLX stores",
        ),
        ("block_sparse_moe.switch_mlp.gate_proj.weight", (4,), r"w1\.weight has shape \(4,\), not one of experts"),
    ],
)
def test_experts_that_are_there_twice_or_not_stacked_are_refused(tmp_path, name, shape, message):
    tiny = TINY["mixtral"]
    tensors = as_mlx_has(random_tensors(tiny["shapes"]), "mixtral")
    tensors[f"model.layers.0.{name}"] = np.zeros(shape, "<f4")
    with pytest.raises(ModelError, match=message):
        load_model(write_model(tmp_path, tiny["config"], tensors))
