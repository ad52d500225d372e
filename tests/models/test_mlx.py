"""Checkpoints of MLX: matrices as loops over the definition of each format have them, and layouts as mlx_lm writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import read_config
from foreword.models.loader import load_model
from foreword.models.quantized import conversions, read_weights
from foreword.models.quants import Quant
from foreword.models.safetensors import read_directory
from models.mlx_layouts import as_mlx_has
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


OF_IMAGES_TOO = ("qwen3_5", "qwen3_5_moe", "llama4")
"""The types of models that mlx_lm writes with the text model as a part."""


def mlx_model(folder, name):
    """(tensors, directory) of a recorded model as mlx_lm writes it."""
    tiny = TINY[name]
    config = {**tiny["config"], "num_experts_per_tok": 1} if name == "llama4" else tiny["config"]
    tensors = as_mlx_has(random_tensors(tiny["shapes"]), config)
    kind = config["model_type"].removesuffix("_text")
    if kind in OF_IMAGES_TOO:
        config = {"model_type": kind, "vocab_size": config["vocab_size"], "text_config": tiny["config"]}
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


LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_head_dim": 40}
"""Sizes of latent attention with groups of columns in each matrix."""
LATENT_ROWS = {"q_b_proj": 4 * 40, "kv_b_proj": 4 * 64, "kv_a_proj_with_mqa": 32 + 8, "kv_a_layernorm": 32}


def larger_latent(name, shape):
    part = name.split(".")[-2]
    columns = {"o_proj": 4 * 32, "kv_b_proj": 32}.get(part, shape[-1])
    return [LATENT_ROWS.get(part, shape[0]), *([columns] if len(shape) > 1 else shape[1:])]


def quantised(tensors, *form):
    """(the tensors with each matrix that has whole groups in a format, those with its weights as floats)"""
    stored, floats, random = {}, {}, np.random.default_rng(0)
    for name, value in tensors.items():
        if value.ndim > 1 and value.shape[-1] % 32 == 0 and name.endswith("weight"):
            parts = draw(random, int(np.prod(value.shape[:-1])), value.shape[-1], *form)
            if form[0] == "affine":
                parts["scales"] = (parts["scales"] * 0.2).astype("<f2")
                parts["biases"] = (parts["biases"] * 0.1).astype("<f2")
            else:
                parts["scales"] -= 3
            floats[name] = weights_of(parts, *form).astype("<f4").reshape(value.shape)
            path = name.removesuffix("weight")
            stored |= {path + key: array.reshape(*value.shape[:-1], -1) for key, array in parts.items()}
        else:
            stored[name] = floats[name] = value
    return stored, floats


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [("affine", 4, 32), ("mxfp4", 4, 32)], ids=name_of)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "name", ["mixtral", "deepseek-v3", "granite-hybrid", "falcon-h1", "dots1", "gemma4-moe", "nemotron-h-moe", "llama4"]
)
def test_a_quantised_model_gives_the_logits_of_its_weights_as_floats(tmp_path, name, executor, form):
    tiny = TINY[name]
    config, shapes = dict(tiny["config"]), tiny["shapes"]
    if name == "deepseek-v3":
        assert (config["num_attention_heads"], config["qk_rope_head_dim"]) == (4, 8)
        config |= LATENT
        shapes = {name: larger_latent(name, shape) for name, shape in shapes.items()}
    stored, floats = quantised(as_mlx_has(random_tensors(shapes), config), *form)
    assert len(stored) > len(floats)
    if name == "deepseek-v3":
        assert "model.layers.0.self_attn.embed_q.scales" in stored
    both = {"quantization": settings(*form), "quantization_config": settings(*form)}
    if name == "llama4":
        config = {"model_type": name, "vocab_size": config["vocab_size"], "text_config": config}
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    models = [
        load_model(write_model(tmp_path / "stored", {**config, **both}, stored)),
        load_model(write_model(tmp_path / "floats", config, floats)),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_multiplier": None}, "key_multiplier is missing, and MLX has multiplied the weights by one of its own"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported in a checkpoint by MLX"),
    ],
)
def test_a_falcon_h1_that_mlx_multiplied_in_another_way_is_refused(tmp_path, changes, message):
    tiny = TINY["falcon-h1"]
    tensors = as_mlx_has(random_tensors(tiny["shapes"]), tiny["config"])
    with pytest.raises(ModelError, match=message):
        load_model(write_model(tmp_path, {**tiny["config"], **changes}, tensors))


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
            r"tensor model\.layers\.0\.block_sparse_moe\.experts\.1\.w1\.weight is not part of a mixtral model",
        ),
        (
            "block_sparse_moe.switch_mlp.gate_proj.weight",
            (4,),
            r"gate_proj\.weight \S+ has shape \(4,\), expected \(40, 32\)",
        ),
    ],
)
def test_experts_that_are_there_twice_or_not_stacked_are_refused(tmp_path, name, shape, message):
    tiny = TINY["mixtral"]
    tensors = as_mlx_has(random_tensors(tiny["shapes"]), tiny["config"])
    tensors[f"model.layers.0.{name}"] = np.zeros(shape, "<f4")
    with pytest.raises(ModelError, match=message):
        load_model(write_model(tmp_path, tiny["config"], tensors))


def test_experts_in_nvfp4_have_a_global_scale_each(tmp_path):
    """The weights of an expert are those of the format times its number / (448 · 6), as mlx 0.32.4 multiplies them."""
    form, path = ("nvfp4", 4, 16), "layers.0.mlp.switch_mlp.up_proj"
    parts = draw(np.random.default_rng(0), 3 * 8, 64, *form)
    stacked = {key: array.reshape(3, 8, -1) for key, array in parts.items()}
    numbers = np.array([0.5, 30.0, 2688.0], "<f4")
    tensors = under(path, {**stacked, "global_scale": numbers})
    own = {**settings(*form), "global_scale": True}
    want = weights_of(parts, *form).reshape(3, 8, 64) * numbers[:, None, None] / 2688
    for quantization in ({**settings(*form), path: own}, settings(*form)):
        tensor = read(tmp_path, quantization, tensors)[f"{path}.weight"]
        assert tensor.shape == (3, 8, 64)
        for e in range(3):
            got = tensor.dequantize()[e]
            largest = np.repeat(np.abs(want[e]).reshape(8, -1, 32).max(-1), 32, axis=1)
            assert (np.abs(got - want[e]) <= largest / 250 + 4e-6 * 6).all()
    with pytest.raises(ModelError, match=rf"comes without {path}\.global_scale"):
        read(tmp_path, {**settings(*form), path: own}, under(path, stacked))
    with pytest.raises(ModelError, match=r"\[1\. 0\.\] is not 3 numbers above 0"):
        read(tmp_path, settings(*form), under(path, {**stacked, "global_scale": np.array([1, 0], "<f4")}))


def test_what_transformers_writes_for_metal_is_affine(tmp_path):
    form = "affine", 4, 64
    parts = draw(np.random.default_rng(0), 24, 256, *form)
    parts["qbiases"] = parts.pop("biases")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "metal", "bits": 4, "group_size": 64}})
    )
    write_safetensors(tmp_path / "model.safetensors", under("w", parts))
    tensors = read_weights(read_directory(tmp_path), read_config(tmp_path / "config.json"))
    assert list(tensors) == ["w.weight"]
    assert_near(tensors["w.weight"], weights_of({**parts, "biases": parts["qbiases"]}, *form), *form[:2])


def test_settings_of_a_layer_may_lack_what_is_usual(tmp_path):
    whole_form, usual = ("affine", 8, 32), ("affine", 4, 64)
    some, other = draw(np.random.default_rng(0), 8, 128, *whole_form), draw(np.random.default_rng(1), 8, 128, *usual)
    tensors = {**under("a", some), **under("b", other)}
    got = read(tmp_path, {**settings(*whole_form), "b": {"bits": 4}}, tensors)
    assert_near(got["b.weight"], weights_of(other, *usual), *usual[:2])
