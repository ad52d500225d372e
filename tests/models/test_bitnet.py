"""BitNet checkpoints: ternary weights in every form, as loops over single weights have them, and rounded inputs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from foreword.errors import ConfigError, ModelError
from foreword.models.config import read_config
from foreword.models.loader import load_model
from foreword.models.quantized import conversions, read_weights
from foreword.models.quants import Quant
from foreword.models.safetensors import read_directory
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model, write_safetensors

NAME = "model.layers.0.mlp.up_proj"
BITLINEAR = {"quant_method": "bitnet"}
OFFLINE = {**BITLINEAR, "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = {**OFFLINE, "quantization_mode": "online", "modules_to_not_convert": ["lm_head"]}


def read(folder, quantization, parts):
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    write_safetensors(folder / "model.safetensors", {f"{NAME}.{name}": array for name, array in parts.items()})
    return read_weights(read_directory(folder), read_config(folder / "config.json"))


def ternary(rows=8, columns=64, seed=0):
    return np.random.default_rng(seed).integers(-1, 2, (rows, columns))


def packed(integers):
    """Row r + 0, 1, 2 and 3 quarters of the rows in the bits of a byte, lowest first."""
    quarter = len(integers) // 4
    out = np.zeros((quarter, integers.shape[1]), np.int8)
    for r in range(quarter):
        for i in range(integers.shape[1]):
            fields = [int(integers[r + n * quarter, i] + 1) for n in range(4)]
            out[r, i] = np.array(sum(field << 2 * n for n, field in enumerate(fields)), np.uint8).view(np.int8)
    return out


def online(values):
    """The weights that are made of floats."""
    scale = max(float(np.abs(values.astype(np.float64)).mean()), 1e-5)
    return np.array([[scale * max(-1, min(1, round(float(v) / scale))) for v in row] for row in values])


def scale_of(number, dtype="<f4"):
    return np.array([number], dtype)


FORMS = {
    "bitlinear": (BITLINEAR, lambda t: {"weight": packed(t), "weight_scale": scale_of(7)}, 1 / 7),
    "packed": (OFFLINE, lambda t: {"weight": packed(t), "weight_scale": scale_of(0.3)}, 0.3),
    "as floats": (OFFLINE, lambda t: {"weight": t.astype("<f4"), "weight_scale": scale_of(0.3)}, 0.3),
    "with a scale in F16": (
        OFFLINE, lambda t: {"weight": packed(t), "weight_scale": scale_of(0.3, "<f2")}, float(np.float16(0.3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_ternary_weights_are_read(tmp_path, form):
    quantization, make_parts, scale = FORMS[form]
    tensor = read(tmp_path, quantization, make_parts(ternary()))[f"{NAME}.weight"]
    assert (tensor.quant, tensor.shape) == (Quant.Q4_0, (8, 64))
    bound = 0 if "F16" in form else 1 / 2048
    np.testing.assert_allclose(tensor.dequantize(), ternary() * scale, rtol=bound)


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_are_not_a_multiple_of_32_are_exact(tmp_path, form):
    quantization, make_parts, scale = FORMS[form]
    tensor = read(tmp_path, quantization, make_parts(ternary(12, 40)))[f"{NAME}.weight"]
    assert tensor.quant is Quant.F32
    np.testing.assert_allclose(tensor.dequantize(), ternary(12, 40) * scale, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_floats_become_ternary(tmp_path, dtype):
    values = np.random.default_rng(0).normal(0, 0.05, (520, 96)).astype(dtype)
    tensor = read(tmp_path, ONLINE, {"weight": values})[f"{NAME}.weight"]
    np.testing.assert_allclose(tensor.dequantize(), online(values), rtol=1 / 1024)
    assert len(np.unique(tensor.dequantize())) == 3


def test_floats_in_bf16_become_ternary_in_bf16(tmp_path):
    values = np.random.default_rng(0).normal(0, 0.05, (8, 40)).astype("<f4")
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    exact = (upper.astype(np.uint32) << 16).view(np.float32)
    found = read(tmp_path, ONLINE, {"weight": upper})[f"{NAME}.weight"].dequantize()
    np.testing.assert_allclose(found, online(exact), rtol=1 / 256)
    assert not (found.view(np.uint32) & 0xFFFF).any()


def test_rows_of_a_matrix_are_those_of_the_whole(tmp_path):
    for quantization, parts in (
        (OFFLINE, {"weight": packed(ternary(24)), "weight_scale": scale_of(0.3)}),
        (ONLINE, {"weight": ternary(24).astype("<f4")}),
    ):
        rows = read(tmp_path, quantization, parts)[f"{NAME}.weight"].stored
        data = rows.read()
        for part in (slice(3, 17), slice(23, 40), slice(5, 5), slice(6, 12)):
            np.testing.assert_array_equal(rows[part].read(), data[part])


def test_what_was_converted_is_told(tmp_path):
    [told] = conversions(read(tmp_path, *FORMS["packed"][:1], FORMS["packed"][1](ternary())).values())
    assert told.startswith("matrices converted from BitNet (packed) to Q4_0: 1.")


GOOD = {"weight": packed(ternary()), "weight_scale": scale_of(0.3)}


@pytest.mark.parametrize(
    ("quantization", "parts", "message"),
    [
        ({**OFFLINE, "linear_class": "linear"}, GOOD, "linear_class is 'linear', which is not supported"),
        ({**OFFLINE, "quantization_mode": "later"}, GOOD, "quantization_mode is 'later', which is not supported"),
        ({**OFFLINE, "use_rms_norm": True}, GOOD, "use_rms_norm = true is not supported"),
        ({**ONLINE, "modules_to_not_convert": ["mlp"]}, GOOD, r"modules_to_not_convert = \['mlp'\] is not supported"),
        ({**OFFLINE, "group": 4}, GOOD, "quantization_config.group = 4 is not supported"),
        (OFFLINE, {"weight": GOOD["weight"]}, f"comes without {NAME}.weight_scale"),
        (OFFLINE, {"weight": np.ones((4, 32), "<f4")}, f"comes without {NAME}.weight_scale"),
        (OFFLINE, {**GOOD, "weight": np.full((2, 64), -1, np.int8)}, "holds other numbers than -1, 0 and 1"),
        (OFFLINE, {**GOOD, "weight": np.full((2, 64), 0.5, "<f4")}, "holds other numbers than -1, 0 and 1"),
        (ONLINE, {"weight": np.full((2, 64), np.nan, "<f4")}, "holds a number that is not finite"),
        (ONLINE, {"weight": GOOD["weight"]}, "dtype 'U8' is not supported"),
        (OFFLINE, {**GOOD, "weight_scale": np.ones(2, "<f4")}, r"scales \[1. 1.\] are not one number"),
        *((OFFLINE, {**GOOD, "weight_scale": scale_of(bad)}, "are not one number") for bad in (0, -1, np.nan, 1e9)),
        (BITLINEAR, {**GOOD, "weight_scale": scale_of(1e-9)}, "are not one number"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_ternary_is_refused(tmp_path, quantization, parts, message):
    with pytest.raises(ModelError, match=rf"{re.escape(str(tmp_path))}.*{message}"):
        read(tmp_path, quantization, parts)[f"{NAME}.weight"].dequantize()


def quantized(folder, name="bitnet"):
    """A tiny model whose products are ternary, packed, and the same as floats: two models."""
    tiny, parts, floats = TINY[name], {}, {}
    for key, value in random_tensors(tiny["shapes"]).items():
        if key.endswith("_proj.weight"):
            integers = ternary(*value.shape, seed=len(parts))
            scale = np.float16(value.std())
            parts |= {key: packed(integers), f"{key}_scale": scale_of(scale, "<f2")}
            floats[key] = (integers * np.float32(scale)).astype("<f4")
        else:
            parts[key] = floats[key] = value
    config = {**tiny["config"], "quantization_config": OFFLINE}
    found = load_model(write_model(folder / "quantized", config, parts))
    plain = load_model(write_model(folder / "floats", tiny["config"], floats))
    return found, replace(plain, spec=plain.spec.changed(rounds_inputs=True))


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["bitnet", "llama3", "apertus"])
def test_a_packed_model_gives_the_logits_of_its_weights_as_floats(tmp_path, name, executor):
    models = quantized(tmp_path, name)
    [got], [want] = (all_logits(model, [TEXT], whole([TEXT]), executor) for model in models)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("executor", [name for name in EXECUTORS if name != "numpy"])
def test_rounded_inputs_are_those_of_the_reference_executor(tmp_path, executor):
    model, _ = quantized(tmp_path)
    [want] = all_logits(model, [TEXT], whole([TEXT]))
    [got] = all_logits(model, [TEXT], whole([TEXT]), executor)
    assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "olmo2", "lfm2"])
def test_models_whose_products_are_not_all_rounded_are_refused(tmp_path, name):
    with pytest.raises(ModelError, match="a quantization_config of BitNet is not supported for"):
        load_model(make(tmp_path, name, quantization_config=ONLINE))


def test_numbers_that_are_rounded_together_are_not_divided_among_processes(tmp_path):
    shards = pytest.importorskip("foreword.executors.torch.shard")
    spec = load_model(make(tmp_path, "bitnet")).spec
    for one in (spec, spec.changed(inner_norms=False, rounds_inputs=True)):
        with pytest.raises(ConfigError, match="2 processes: bitnet norms or rounds all numbers in an MLP together"):
            shards.Shards(0, 2).spec(one)
