"""Matrices of GGUF files in NVFP4 with factors: those of the blocks times the factor, within the bound of Q8_0."""

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.gguf import read_gguf
from foreword.models.loader import load_model
from foreword.models.naming import split_halves
from foreword.models.quantized import conversions
from foreword.models.quantized.gguf_nvfp4 import with_factors
from foreword.models.quants import Quant, dequantize
from models import gguf_models, gguf_writer
from models.recorded import TINY
from models.tiny import random_tensors

SHAPES = {"blk.0.attn_q": (6, 128), "blk.0.ffn_up_exps": (3, 4, 64), "output": (5, 64)}
FACTORS = {"blk.0.attn_q": [3e-4], "blk.0.ffn_up_exps": [0.5, 2.0, 1e-3]}


def tensors(factors=FACTORS):
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in SHAPES.items():
        data = rng.integers(0, 256, np.prod(shape) // 64 * 36, np.uint8)
        data.reshape(-1, 36)[:, :4] %= 127  # scales of numbers
        found[f"{name}.weight"] = Quant.NVFP4, shape, data
    for name, own in factors.items():
        found[f"{name}.scale"] = Quant.F32, (len(own),), gguf_writer.f32(own)
        found[f"{name}.input_scale"] = Quant.F32, (1,), gguf_writer.f32([7.0])
    return found


def read(folder, factors=FACTORS, own=()):
    path = gguf_writer.write(folder / "a.gguf", {}, tensors(factors))
    return with_factors(path, read_gguf(path).tensors, own)


def test_matrices_are_multiplied_with_their_factors(tmp_path):
    got = read(tmp_path)
    assert got.keys() == {f"{name}.weight" for name in SHAPES}
    assert got["output.weight"].quant is Quant.NVFP4
    for name, own in FACTORS.items():
        shape, tensor = SHAPES[name], got[f"{name}.weight"]
        want = dequantize(tensors()[f"{name}.weight"][2], Quant.NVFP4).reshape(len(own), -1) * np.float32(own)[:, None]
        most = np.abs(want.reshape(-1, 32)).max(axis=1, keepdims=True)
        assert (tensor.quant, tensor.shape) == (Quant.Q8_0, shape)
        assert (np.abs(tensor.dequantize() - want.reshape(shape)).reshape(-1, 32) <= most / 250 + 1e-6).all()
    reordered = {name: split_halves(t, 2, 2) if name.startswith("blk.0.attn") else t for name, t in got.items()}
    assert conversions(reordered.values()) == [
        "matrices converted from NVFP4 with factors to Q8_0: 2. "
        "A weight changes by at most 1/250 of the largest of 32 weights"
    ]


def test_a_model_with_factors_is_loaded(tmp_path, monkeypatch):
    tiny, kept = TINY["llama3"], []
    config = {**tiny["config"], "hidden_size": 64, "head_dim": 16}
    sizes = {32: 64, 16: 32}  # hidden states and queries; keys
    shapes = {name: [sizes.get(size, size) for size in shape] for name, shape in tiny["shapes"].items()}
    of_writer = gguf_writer.write
    monkeypatch.setattr(gguf_writer, "write", lambda path, *given, **options: kept.append(given))
    gguf_models.write(tmp_path / "a.gguf", config, random_tensors(shapes))
    [(metadata, own)] = kept
    block = np.full(36, 0x21, np.uint8)
    for name, (_, shape, _) in [*own.items()]:
        if len(shape) == 2 and shape[1] % 64 == 0:
            own[name] = Quant.NVFP4, shape, np.tile(block, np.prod(shape) // 64)
            own[name.replace(".weight", ".scale")] = Quant.F32, (1,), gguf_writer.f32([4.0])
    weights = load_model(of_writer(tmp_path / "a.gguf", metadata, own)).weights
    assert {weights[name].quant for name in ("embed", "lm_head", "layers.0.q", "layers.3.up")} == {Quant.Q8_0}
    want = np.abs(dequantize(block[None], Quant.NVFP4)).max() * 4
    np.testing.assert_allclose(np.abs(weights["layers.0.q"].dequantize()).max(), want, rtol=1 / 250)
    assert conversions(weights.values())[0].startswith("matrices converted from NVFP4 with factors to Q8_0: 26.")


def test_factors_of_the_model_itself_stay(tmp_path):
    got = read(tmp_path, own=("ffn_up_exps.scale",))
    assert got["blk.0.ffn_up_exps.weight"].quant is Quant.NVFP4
    assert got["blk.0.ffn_up_exps.scale"].shape == (3,)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            {"blk.0.attn_q": [1.0] * 6},
            r"tensor blk\.0\.attn_q\.scale: shape \(6,\) does not fit blk\.0\.attn_q\.weight",
        ),
        ({"blk.0.ffn_up_exps": [1.0] * 4}, r"shape \(4,\) does not fit blk\.0\.ffn_up_exps\.weight \(3, 4, 64\)"),
        ({"output": [np.nan]}, r"tensor output\.scale: nan is not a number above 0, of at most 1024"),
        ({"output": [0.0]}, r"0\.0 is not a number above 0"),
        ({"output": [2000.0]}, r"2000\.0 is not a number above 0, of at most 1024"),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path, factors, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, factors)
