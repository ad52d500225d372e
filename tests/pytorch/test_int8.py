"""Weights of 8 bits on PyTorch: the logits of the rounded weights, in the memory of 8 bits."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.errors import ConfigError
from foreword.executors.torch.encoder import TorchEncoderExecutor
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.int8 import Int8Matrix
from foreword.executors.torch.options import DTYPES
from foreword.executors.torch.shard import Shard
from foreword.executors.torch.weights import Loader
from foreword.models.pooling import PoolingSpec
from foreword.models.weights import Weights
from kernels.kernel_driver import Driver
from kernels.kernel_reference import SPECS, Reference, float_tensor, random_weights
from kernels.test_kernel_encoder import SPECS as ENCODERS
from kernels.test_kernel_encoder import weights_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ERRORS = {"fp32": 2e-5, "fp16": 0.02, "bf16": 0.12}
MATRIX = re.compile(r"layers\.\d+\.(q|k|v|o|attn_gate|gate|up|down|state\.(q|k|v|z|o))")
DENSE = [name for name, spec in SPECS.items() if not any(layer.moe for layer in spec.layers)]


def rounded(weights: Weights, dtype: str) -> Weights:
    """The weights with each row of a layer's matrix rounded to 127 steps of its largest magnitude. A step is a number
    of the dtype.
    """

    def of(name, tensor):
        if not MATRIX.fullmatch(name):
            return tensor
        values = tensor.dequantize()
        step = (
            torch.from_numpy(np.abs(values).max(1, keepdims=True) / np.float32(127)).to(DTYPES[dtype]).float().numpy()
        )
        return float_tensor(np.clip(np.rint(values / step), -127, 127) * step)

    return {name: of(name, tensor) for name, tensor in weights.items()}


def make(spec, weights, **options):
    options = {"dtype": "fp32", "num_threads": 1, "weight_format": "int8", **options}
    return TorchExecutor(spec, weights, num_blocks=400, block_size=4, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_the_rounded_weights(name, dtype, device):
    """In steps of many tokens and of few."""
    spec, weights = SPECS[name], random_weights(SPECS[name])
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 40).tolist()
    want = Reference(spec, rounded(weights, dtype)).logits(tokens)
    run = Driver(spec, weights, executor=make(spec, weights, dtype=dtype, device=device), block_size=4)
    for logits, position in zip(run.run_alone("a", tokens, [31, 1, 7, 1]), (30, 31, 38, 39), strict=True):
        assert np.abs(logits - want[position]).max() < ERRORS[dtype] * np.abs(want[position]).max()


@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_ranks_have_the_numbers_of_one_process(split):
    rng = np.random.default_rng(0)
    table = {"a": float_tensor(rng.normal(size=(9, 14))), "b": float_tensor(rng.normal(size=(6, 14)) * 1e-3)}
    device = torch.device("cpu")

    def values_of(shard, names):
        product = Loader(table, device, torch.float32, shard, "int8").linear("", names, split=split)
        return product.weight.product(torch.eye(len(product.inputs)), None).T

    for name, tensor in table.items():
        parts = [values_of(Shard(rank, 3), [name]) for rank in range(3)]
        whole = torch.cat(parts, dim=0 if split == "outputs" else 1)
        np.testing.assert_array_equal(whole, values_of(None, [name]))
        steps = np.abs(tensor.dequantize()).max(1, keepdims=True) / 127
        assert np.all(np.abs(whole.numpy() - tensor.dequantize()) <= 0.501 * steps)


def test_extreme_rows_are_finite():
    weights = np.array([[0, 0], [3e38, -1e38], [1e-44, 0], [1, -1]], np.float32)
    matrix = Loader({"m": float_tensor(weights)}, torch.device("cpu"), torch.float32, None, "int8").linear("", ["m"])
    got = matrix(torch.eye(2)).T.numpy()
    assert np.all(np.abs(got - weights) <= np.abs(weights).max(1, keepdims=True) / 254 + 1e-43)


def test_memory_is_that_of_8_bits():
    spec, weights = SPECS["llama"], random_weights(SPECS["llama"])
    for layer in make(spec, weights).decoder.layers:
        for product in layer.products:
            outputs, columns = sum(map(len, product.outputs)), -(-len(product.inputs) // 16) * 16
            assert product.weight.nbytes == outputs * columns + 4 * outputs


def test_encoders_have_8_bits_too():
    for spec in ENCODERS.values():
        executor = TorchEncoderExecutor(spec, weights_of(spec), PoolingSpec(), weight_format="int8")
        assert all(isinstance(layer.qkv.weight, Int8Matrix) for layer in executor.layers)


def test_what_cannot_be_8_bits_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"weight_format='q4': on PyTorch it is one of 'auto', 'int8'; dtype is"):
        make(SPECS["llama"], random_weights(SPECS["llama"]), weight_format="q4")
    with pytest.raises(ConfigError, match="weight_format='int8': PyTorch has no such product of experts"):
        make(SPECS["moe"], random_weights(SPECS["moe"]))
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(ConfigError, match=r"weight_format='int8': PyTorch .* has no such product on cpu"):
        make(SPECS["llama"], random_weights(SPECS["llama"]))
